"""What the kernel rules of all architectures share: the provider, inputs and link arguments."""

load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain")
load("@host_compiler//:version.bzl", "HOST_COMPILER")

KernelInfo = provider(
    doc = "One variant's built library.",
    fields = {
        "headers": "depset of the headers that its sources may include",
        "library": "libdeepep_<variant>.so",
        "reports": "list of files with what the compiler says of its kernels, one a source",
        "sources": "list of its rendered sources",
        "toolchain": "dict of the compilers' names and versions",
        "variant": "the variant's name",
    },
)

# HOST_COMPILER is read by no program: it makes the compiler's version a part of the cache key.
ACTION_ENV = {
    "HOST_COMPILER": HOST_COMPILER,
    "LC_ALL": "C",
    "PATH": "/usr/bin:/bin",
}

COMMON_ATTRS = {
    "srcs": attr.label_list(allow_files = [".cc", ".cu"], mandatory = True),
    "_cc_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
    "_exports": attr.label(default = "//tools/build:exports.lds", allow_single_file = True),
    "_headers": attr.label_list(default = ["//kernels/host"], providers = [CcInfo]),
}

def host_compiler(ctx):
    """The C++ toolchain's compiler driver.

    Args:
      ctx: a rule's context.

    Returns:
      (depset of the toolchain's files, path of the driver).
    """
    toolchain = find_cpp_toolchain(ctx)
    features = cc_common.configure_features(
        ctx = ctx,
        cc_toolchain = toolchain,
        unsupported_features = ctx.disabled_features,
    )
    driver = cc_common.get_tool_for_action(
        feature_configuration = features,
        action_name = "c++-link-dynamic-library",
    )
    return toolchain.all_files, driver

def kernel_headers(ctx):
    """The headers that rendered sources may include.

    Args:
      ctx: the context of a rule with COMMON_ATTRS.

    Returns:
      A depset of files.
    """
    return depset(transitive = [dep[CcInfo].compilation_context.headers for dep in ctx.attr._headers])

def link_library(ctx, inputs, libraries = [], linkopts = []):
    """Links objects to the variant's library, with nothing but deepep_* visible.

    Args:
      ctx: the context of a rule with COMMON_ATTRS.
      inputs: objects and archives, in link order.
      libraries: shared libraries to link.
      linkopts: further arguments, after the inputs.

    Returns:
      The library's File.
    """
    toolchain_files, driver = host_compiler(ctx)
    library = ctx.actions.declare_file("libdeepep_%s.so" % ctx.label.name)
    files = inputs + libraries
    ctx.actions.run(
        executable = driver,
        arguments = ["-shared", "-o", library.path] + [f.path for f in files] + [
            "-Wl,-soname," + library.basename,
            "-Wl,--version-script," + ctx.file._exports.path,
            "-Wl,-z,defs,-z,relro,-z,now",
            "-Wl,--build-id=sha1",
            "-Wl,--enable-new-dtags",
        ] + linkopts + ["-lstdc++", "-lm", "-lpthread", "-ldl", "-lrt"],
        inputs = depset(files + [ctx.file._exports], transitive = [toolchain_files]),
        outputs = [library],
        mnemonic = "LinkKernel",
        progress_message = "Linking " + library.short_path,
        env = ACTION_ENV,
    )
    return library

def kernel_providers(ctx, library, toolchain, reports = []):
    """What every kernel rule returns.

    Args:
      ctx: the context of a rule with COMMON_ATTRS.
      library: the built library.
      toolchain: further facts about the compilers.
      reports: what the compiler says of the kernels, see KernelInfo.

    Returns:
      A list of providers; output group `source` holds the rendered sources, `resources` the reports.
    """
    return [
        DefaultInfo(files = depset([library]), runfiles = ctx.runfiles([library])),
        OutputGroupInfo(source = depset(ctx.files.srcs), resources = depset(reports)),
        KernelInfo(
            headers = kernel_headers(ctx),
            library = library,
            reports = reports,
            sources = ctx.files.srcs,
            toolchain = dict(toolchain, cxx = HOST_COMPILER),
            variant = ctx.label.name,
        ),
    ]
