"""host_kernel(): a variant for the CPU, compiled by the C++ toolchain's compiler.

Must hold: no flag names the building machine's processor (a wheel runs on any x86-64; code for
wider vectors is chosen at run time, by function multiversioning), and no path or time of the build
reaches the object.
"""

load(
    "//tools/build:kernel_common.bzl",
    "ACTION_ENV",
    "COMMON_ATTRS",
    "host_compiler",
    "kernel_headers",
    "kernel_providers",
    "link_library",
)

_COPTS = [
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wdate-time",
    # With PWD=/proc/self/cwd in the environment, debug information holds no sandbox's name.
    "-ffile-prefix-map=/proc/self/cwd=.",
    "-I.",
]

_MODE_COPTS = {
    "dbg": ["-O0", "-g"],
    "fastbuild": ["-O3"],
    "opt": ["-O3"],
}

def _host_kernel_impl(ctx):
    toolchain_files, driver = host_compiler(ctx)
    inputs = depset(transitive = [kernel_headers(ctx), toolchain_files])
    copts = _COPTS + _MODE_COPTS[ctx.var["COMPILATION_MODE"]]
    objects = []
    for src in ctx.files.srcs:
        obj = ctx.actions.declare_file("%s/%s.o" % (ctx.label.name, src.basename[:-len(".cc")]))
        ctx.actions.run(
            executable = driver,
            arguments = copts + ["-c", src.path, "-o", obj.path],
            inputs = depset([src], transitive = [inputs]),
            outputs = [obj],
            mnemonic = "CompileHostKernel",
            progress_message = "Compiling " + src.short_path,
            env = dict(ACTION_ENV, PWD = "/proc/self/cwd"),
        )
        objects.append(obj)
    return kernel_providers(ctx, link_library(ctx, objects), {})

host_kernel = rule(
    implementation = _host_kernel_impl,
    attrs = COMMON_ATTRS,
    fragments = ["cpp"],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)
