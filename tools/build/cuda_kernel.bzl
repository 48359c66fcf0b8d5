"""cuda_kernel(): a variant for one GPU architecture, compiled by nvcc of @cuda.

Must hold: NVSHMEM is linked only where the variant needs it. Its device library must be linked
into each library (its state is per library), and is most of such a library's size.
"""

load("//tools/build:cuda.bzl", "CudaInfo")
load("//tools/build:flags.bzl", "FlagInfo")
load(
    "//tools/build:kernel_common.bzl",
    "ACTION_ENV",
    "COMMON_ATTRS",
    "host_compiler",
    "kernel_headers",
    "kernel_providers",
    "link_library",
)

# Both come with PTX, for the GPUs after them. The kernels use the bulk copy engine but none of
# sm_90a's own instructions, so plain sm_90 is enough and its PTX serves newer GPUs.
_GENCODE = {
    "sm80": "arch=compute_80,code=[sm_80,compute_80]",
    "sm90": "arch=compute_90,code=[sm_90,compute_90]",
}

# Where libnvshmem_host.so.3 lies, seen from deepep/lib: in site-packages, then in Bazel's runfiles.
_NVSHMEM_RPATHS = [
    "$ORIGIN/../../nvidia/nvshmem/lib",
    "$ORIGIN/../../../../cuda/nvshmem/lib",
]

def _nvcc(ctx, arguments, inputs, output, mnemonic):
    """One nvcc call whose output depends on nothing but its inputs; see nvcc_stable.sh.

    Returns:
      The file with what ptxas says of the kernels.
    """
    cuda = ctx.attr._cuda[CudaInfo]
    toolchain_files, driver = host_compiler(ctx)
    stable_name = output.short_path
    report = ctx.actions.declare_file(output.basename + ".resources.txt", sibling = output)
    ctx.actions.run(
        executable = ctx.executable._nvcc_stable,
        arguments = [stable_name, report.path, cuda.nvcc.path, "-ccbin", driver] + arguments + [
            "-gencode",
            _GENCODE[ctx.attr.arch],
            "-o",
            output.path,
        ],
        inputs = depset(transitive = [inputs, cuda.compiler_files, toolchain_files]),
        outputs = [output, report],
        mnemonic = mnemonic,
        progress_message = "%s %s" % (mnemonic, output.short_path),
        env = ACTION_ENV,
    )
    return report

def _compile(ctx, src):
    """The object of one rendered source, and the report on its kernels."""
    cuda = ctx.attr._cuda[CudaInfo]
    arguments = ["-std=c++17", "-I.", "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall,-Wextra"]
    arguments += ["-Werror", "all-warnings", "-Xptxas", "-v"]
    arguments += ["-O0", "-g"] if ctx.var["COMPILATION_MODE"] == "dbg" else ["-O3"]
    if ctx.attr._lineinfo[FlagInfo].value:
        arguments.append("-lineinfo")
    if ctx.attr._aggressive_ptx[FlagInfo].value:
        arguments.append("-DDEEPEP_AGGRESSIVE_PTX")
    if ctx.attr.nvshmem:
        arguments += ["-rdc=true", "-I" + cuda.nvshmem_include]
    obj = ctx.actions.declare_file("%s/%s.o" % (ctx.label.name, src.basename[:-len(".cu")]))
    inputs = depset([src], transitive = [kernel_headers(ctx)])
    return obj, _nvcc(ctx, arguments + ["-c", src.path], inputs, obj, "CompileCudaKernel")

def _cuda_kernel_impl(ctx):
    cuda = ctx.attr._cuda[CudaInfo]
    compiled = [_compile(ctx, src) for src in ctx.files.srcs]
    objects, reports = [obj for obj, _ in compiled], [report for _, report in compiled]
    facts = {"nvcc": cuda.nvcc_version}
    if not ctx.attr.nvshmem:
        library = link_library(ctx, objects + [cuda.cudart_static])
        return kernel_providers(ctx, library, facts, reports)

    dlink = ctx.actions.declare_file("%s/dlink.o" % ctx.label.name)
    device_inputs = objects + [cuda.nvshmem_device, cuda.cudadevrt]
    _nvcc(
        ctx,
        ["-Xcompiler", "-fPIC", "-dlink"] + [f.path for f in device_inputs],
        depset(device_inputs),
        dlink,
        "LinkCudaDevice",
    )
    library = link_library(
        ctx,
        objects + [dlink, cuda.nvshmem_device, cuda.cudadevrt, cuda.cudart_static],
        libraries = [cuda.nvshmem_host],
        linkopts = ["-Wl,-rpath," + path for path in _NVSHMEM_RPATHS],
    )
    return kernel_providers(ctx, library, dict(facts, nvshmem = cuda.nvshmem_version), reports)

cuda_kernel = rule(
    implementation = _cuda_kernel_impl,
    attrs = dict(
        COMMON_ATTRS,
        arch = attr.string(mandatory = True, values = sorted(_GENCODE)),
        nvshmem = attr.bool(mandatory = True, doc = "Link NVSHMEM."),
        _aggressive_ptx = attr.label(default = "//tools/build:aggressive_ptx"),
        _cuda = attr.label(default = "@cuda//:toolkit", providers = [CudaInfo]),
        _lineinfo = attr.label(default = "//tools/build:lineinfo"),
        _nvcc_stable = attr.label(
            default = "//tools/build:nvcc_stable.sh",
            allow_single_file = True,
            cfg = "exec",
            executable = True,
        ),
    ),
    fragments = ["cpp"],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)
