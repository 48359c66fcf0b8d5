"""deepep_kernel(): one variant's rendered sources and its library libdeepep_<variant>.so.

The variant's name is all that a target says; topology and architecture are read from it, and
everything else codegen derives.

Must hold: the same inputs give the same bytes in any output base, on any machine with the same
compilers. Rendering sees codegen and its templates only; compiling sees the rendered file, the
headers of kernels/ and the compiler only.
"""

load("//tools/build:cuda_kernel.bzl", "cuda_kernel")
load("//tools/build:host_kernel.bzl", "host_kernel")

# Translation units of a library, by topology: the same as UNITS in codegen/variant.py, which
# refuses to render a unit that it does not know.
_UNITS = {
    "internode": ["variant", "notify", "dispatch", "combine"],
    "intranode": ["variant", "notify", "dispatch", "combine"],
    "lowlatency": ["variant", "dispatch", "combine"],
}

def rendered_files(variant):
    """Names of a variant's rendered sources, relative to the package //kernels.

    Args:
      variant: the variant's name.

    Returns:
      A list such as ["intranode_host_hany_bf16_rany/notify.cc", ...].
    """
    topology, arch = variant.split("_")[:2]
    if topology not in _UNITS:
        fail("topology of variant %s is %s, but must be one of %s; correct kernels/variants.bzl" %
             (variant, topology, ", ".join(sorted(_UNITS))))
    suffix = "cc" if arch == "host" else "cu"
    return ["%s/%s.%s" % (variant, unit, suffix) for unit in _UNITS[topology]]

def _rendered_sources_impl(ctx):
    for out in ctx.outputs.outs:
        unit = out.basename[:-len(out.extension) - 1]
        ctx.actions.run(
            executable = ctx.executable._codegen,
            arguments = ["render", ctx.attr.variant, unit, "--output", out.path],
            outputs = [out],
            mnemonic = "RenderKernel",
            progress_message = "Rendering " + out.short_path,
        )
    return [DefaultInfo(files = depset(ctx.outputs.outs))]

rendered_sources = rule(
    implementation = _rendered_sources_impl,
    doc = "Renders a variant's translation units, each to a file that has a label.",
    attrs = {
        "outs": attr.output_list(mandatory = True, doc = "FOLDER/UNIT.SUFFIX, one per unit."),
        "variant": attr.string(mandatory = True),
        "_codegen": attr.label(default = "//codegen", executable = True, cfg = "exec"),
    },
)

def deepep_kernel(name):
    """Declares //kernels:<variant>, and //kernels:<variant>/<unit>.<cc|cu> for each unit.

    Args:
      name: the variant's name.
    """
    topology, arch = name.split("_")[:2]
    files = rendered_files(name)
    rendered_sources(
        name = name + "_sources",
        outs = files,
        variant = name,
        visibility = ["//visibility:public"],
    )
    if arch == "host":
        host_kernel(
            name = name,
            srcs = files,
            visibility = ["//visibility:public"],
        )
    else:
        cuda_kernel(
            name = name,
            srcs = files,
            arch = arch,
            nvshmem = topology == "internode",
            visibility = ["//visibility:public"],
        )
