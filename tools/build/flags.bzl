"""Build settings of our own, so that no skylib is needed."""

FlagInfo = provider(
    doc = "The value of a build flag.",
    fields = ["value"],
)

def _flag_impl(ctx):
    value = ctx.build_setting_value
    allowed = getattr(ctx.attr, "values", [])
    if allowed and value not in allowed:
        fail("--%s is %s, but must be one of %s" % (ctx.label, value, ", ".join(allowed)))
    return [FlagInfo(value = value)]

bool_flag = rule(
    implementation = _flag_impl,
    build_setting = config.bool(flag = True),
)

string_flag = rule(
    implementation = _flag_impl,
    attrs = {"values": attr.string_list(doc = "The values that are allowed; empty: any.")},
    build_setting = config.string(flag = True),
)
