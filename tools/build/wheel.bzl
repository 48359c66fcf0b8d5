"""wheel(): a Python wheel of sources, data and built libraries.

Must hold: the same files give the same bytes; files are named in the wheel as in their package.
"""

load("@host_python//:version.bzl", "PYTHON_VERSION")

def _wheel_impl(ctx):
    python = "cp" + PYTHON_VERSION.replace(".", "")
    tag = "-".join([python, python, ctx.attr.platform])
    wheel_file = ctx.actions.declare_file("%s-%s-%s.whl" % (ctx.attr.dist, ctx.attr.version, tag))
    args = ctx.actions.args()
    args.set_param_file_format("multiline")
    args.use_param_file("@%s", use_always = True)
    args.add("--out", wheel_file)
    args.add("--tag", tag)
    args.add("--python", PYTHON_VERSION)
    args.add("--summary", ctx.attr.summary)
    args.add_all(ctx.files.license, before_each = "--license")
    args.add_all(ctx.files.readme, before_each = "--readme")
    args.add_all(ctx.attr.requires, before_each = "--requires")
    for src in ctx.files.srcs:
        name = src.short_path[len(ctx.label.package) + 1:]
        args.add("--file", "%s=%s" % (name, src.path))
    ctx.actions.run(
        executable = ctx.executable._make_wheel,
        arguments = [args],
        inputs = ctx.files.srcs + ctx.files.license + ctx.files.readme,
        outputs = [wheel_file],
        mnemonic = "MakeWheel",
        progress_message = "Packing " + wheel_file.short_path,
    )
    return [DefaultInfo(files = depset([wheel_file]), runfiles = ctx.runfiles([wheel_file]))]

wheel = rule(
    implementation = _wheel_impl,
    attrs = {
        "dist": attr.string(mandatory = True),
        "license": attr.label(allow_files = True, mandatory = True),
        "platform": attr.string(default = "linux_x86_64"),
        "readme": attr.label(allow_files = True, mandatory = True),
        "requires": attr.string_list(doc = "Requires-Dist lines."),
        "srcs": attr.label_list(allow_files = True, mandatory = True),
        "summary": attr.string(mandatory = True),
        "version": attr.string(mandatory = True),
        "_make_wheel": attr.label(default = "//tools/build:make_wheel", executable = True, cfg = "exec"),
    },
)
