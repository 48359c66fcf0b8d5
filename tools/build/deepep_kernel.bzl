"""deepep_kernel(): one variant's rendered sources and its library libdeepep_<variant>.so.

The variant's name is all that a target says; topology and architecture are read from it, and
everything else codegen derives.

Must hold: the same inputs give the same bytes in any output base, on any machine with the same
compilers. Rendering sees codegen and the unit's templates only; compiling sees the rendered file, the
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

def _templates_of(ctx, topology, unit):
    """The templates that a unit's rendering may read: its own, and those that all share."""
    own = "/templates/%s/%s.cu.j2" % (topology, unit)
    return [
        template
        for template in ctx.files._templates
        if "/templates/base/" in template.path or
           "/templates/macros/" in template.path or
           template.path.endswith(own)
    ]

def _rendered_sources_impl(ctx):
    for out in ctx.outputs.outs:
        unit = out.basename[:-len(out.extension) - 1]
        templates = _templates_of(ctx, ctx.attr.variant.split("_")[0], unit)
        folder = templates[0].path.rpartition("/templates/")[0] + "/templates"
        ctx.actions.run(
            executable = ctx.executable._codegen,
            arguments = ["render", ctx.attr.variant, unit, "--templates", folder, "--output", out.path],
            inputs = templates,
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
        "_codegen": attr.label(default = "//codegen:renderer", executable = True, cfg = "exec"),
        "_templates": attr.label(default = "//codegen:templates", allow_files = True),
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
