"""placed_files(): built files in the folder of a package where Python looks for them."""

def _placed_files_impl(ctx):
    placed = []
    for src in ctx.files.srcs:
        out = ctx.actions.declare_file("%s/%s" % (ctx.attr.folder, src.basename))
        ctx.actions.symlink(output = out, target_file = src)
        placed.append(out)
    return [DefaultInfo(files = depset(placed), runfiles = ctx.runfiles(placed))]

placed_files = rule(
    implementation = _placed_files_impl,
    attrs = {
        "folder": attr.string(mandatory = True, doc = "Relative to the package of the target."),
        "srcs": attr.label_list(allow_files = True, mandatory = True),
    },
)
