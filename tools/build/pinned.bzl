"""pinned(): one target that packages exactly the listed variants, with their hashes.

    load("//tools/build:pinned.bzl", "pinned")

    pinned(
        name = "serving",
        variants = ["NAME", "NAME@SHA256"],
    )

It makes a folder `serving` with the libraries, manifest.json, and pins.txt, a line NAME@SHA256 for
each. The folder is ready for DEEPEP_VARIANT_PATH; the lines are pins for DEEPEP_PIN and for
`variants` here. A variant that is given with a sha256 must come out with it, or the build fails.
"""

load("//tools/build:kernel_common.bzl", "KernelInfo")
load("//tools/build:kernel_libraries.bzl", "write_manifest")

def _pinned_libraries_impl(ctx):
    kernels = [kernel[KernelInfo] for kernel in ctx.attr.kernels]
    libraries = [kernel.library for kernel in kernels]
    placed = []
    for library in libraries:
        out = ctx.actions.declare_file("%s/%s" % (ctx.label.name, library.basename))
        ctx.actions.symlink(output = out, target_file = library)
        placed.append(out)

    pins = ctx.actions.declare_file(ctx.label.name + "/pins.txt")
    args = ctx.actions.args()
    args.add("--output", pins)
    args.add_all(ctx.attr.expected, format_each = "--expect=%s")
    for kernel in kernels:
        args.add(kernel.library, format = kernel.variant + "=%s")
    ctx.actions.run(
        executable = ctx.executable._codegen,
        arguments = ["pins", args],
        inputs = libraries,
        outputs = [pins],
        mnemonic = "KernelPins",
        progress_message = "Pinning %d kernel libraries" % len(libraries),
    )
    files = placed + [pins, write_manifest(ctx, kernels, ctx.label.name + "/manifest.json")]
    return [DefaultInfo(files = depset(files), runfiles = ctx.runfiles(files))]

_pinned_libraries = rule(
    implementation = _pinned_libraries_impl,
    attrs = {
        "expected": attr.string_list(doc = "NAME@SHA256 of libraries that must not change."),
        "kernels": attr.label_list(allow_empty = False, mandatory = True, providers = [KernelInfo]),
        "_codegen": attr.label(default = "//codegen:renderer", executable = True, cfg = "exec"),
    },
)

def pinned(name, variants, **kwargs):
    """Packages exactly these variants.

    Args:
      name: of the target and of its folder.
      variants: NAME or NAME@SHA256; each is in kernels/variants.bzl or in the own table.
      **kwargs: attributes that every rule has, such as visibility.
    """
    _pinned_libraries(
        name = name,
        expected = [variant for variant in variants if "@" in variant],
        kernels = ["//kernels:" + variant.split("@")[0] for variant in variants],
        **kwargs
    )
