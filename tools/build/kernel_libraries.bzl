"""kernel_libraries(): a set of built variants and the manifest that the registry reads."""

load("//tools/build:kernel_common.bzl", "KernelInfo")

def write_manifest(ctx, kernels, path):
    """Writes the manifest of some libraries.

    Args:
      ctx: the context of a rule with the attribute _codegen.
      kernels: list of KernelInfo.
      path: where, relative to the package.

    Returns:
      The manifest's File.
    """
    headers = depset(transitive = [kernel.headers for kernel in kernels])
    libraries = [kernel.library for kernel in kernels]

    manifest = ctx.actions.declare_file(path)
    args = ctx.actions.args()
    args.use_param_file("@%s", use_always = True)
    args.set_param_file_format("multiline")
    args.add("--output", manifest)
    args.add_all(headers, format_each = "--header=%s")
    for kernel in kernels:
        args.add_all(["--toolchain=%s=%s=%s" % (kernel.variant, key, value) for key, value in sorted(kernel.toolchain.items())])
        args.add_all(kernel.sources, format_each = "--source=%s=%%s" % kernel.variant)
        args.add_all(kernel.reports, format_each = "--resources=%s=%%s" % kernel.variant)
    for kernel in kernels:
        args.add(kernel.library, format = kernel.variant + "=%s")
    ctx.actions.run(
        executable = ctx.executable._codegen,
        arguments = ["manifest", args],
        inputs = depset(
            libraries + [src for k in kernels for src in k.sources + k.reports],
            transitive = [headers],
        ),
        outputs = [manifest],
        mnemonic = "KernelManifest",
        progress_message = "Writing the manifest of %d kernel libraries" % len(libraries),
    )
    return manifest

def _kernel_libraries_impl(ctx):
    kernels = [kernel[KernelInfo] for kernel in ctx.attr.kernels]
    if not kernels:
        fail("the chosen set has no variants; --kernels=own takes them from the table that " +
             "DEEPEP_VARIANTS=/path/to/table.bzl names")
    files = [kernel.library for kernel in kernels] + [write_manifest(ctx, kernels, "manifest.json")]
    return [
        DefaultInfo(files = depset(files), runfiles = ctx.runfiles(files)),
        OutputGroupInfo(source = depset([src for k in kernels for src in k.sources])),
    ]

kernel_libraries = rule(
    implementation = _kernel_libraries_impl,
    attrs = {
        "kernels": attr.label_list(mandatory = True, providers = [KernelInfo]),
        "_codegen": attr.label(default = "//codegen:renderer", executable = True, cfg = "exec"),
    },
)
