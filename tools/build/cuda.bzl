"""The CUDA compiler and NVSHMEM, as the repository @cuda.

By default both come from the wheels pinned in third_party/cuda/lock.bzl, installed by pip against
their hashes. With DEEPEP_CUDA_HOME (and DEEPEP_NVSHMEM_HOME) set, the toolkit already on the
machine is used instead; the labels stay the same.

Must hold: no .bzl of this project loads a file of @cuda. A load() fetches the repository for every
build of the package that loads it; a label does so only for builds whose targets depend on it. So
the facts about the toolkit are a target, @cuda//:toolkit, and a host build fetches nothing.
"""

load("//tools/build:python.bzl", "foreign_machine", "pinned", "pip_install")

_CUDA_HOME = "DEEPEP_CUDA_HOME"
_NVSHMEM_HOME = "DEEPEP_NVSHMEM_HOME"

CudaInfo = provider(
    doc = "A CUDA toolkit and NVSHMEM.",
    fields = {
        "compiler_files": "depset of what one nvcc call reads: its programs and every header",
        "cudadevrt": "libcudadevrt.a",
        "cudart_static": "libcudart_static.a",
        "nvcc": "the compiler driver",
        "nvcc_version": "such as 13.0.88",
        "nvshmem_device": "libnvshmem_device.a",
        "nvshmem_host": "libnvshmem_host.so.3",
        "nvshmem_include": "folder of NVSHMEM's headers",
        "nvshmem_version": "such as 3.4.5",
    },
)

def _cuda_info_impl(ctx):
    return [
        DefaultInfo(files = depset(ctx.files.compiler_files)),
        CudaInfo(
            compiler_files = depset(ctx.files.compiler_files),
            cudadevrt = ctx.file.cudadevrt,
            cudart_static = ctx.file.cudart_static,
            nvcc = ctx.file.nvcc,
            nvcc_version = ctx.attr.nvcc_version,
            nvshmem_device = ctx.file.nvshmem_device,
            nvshmem_host = ctx.file.nvshmem_host,
            nvshmem_include = ctx.file.nvshmem_device.dirname.rpartition("/")[0] + "/include",
            nvshmem_version = ctx.attr.nvshmem_version,
        ),
    ]

cuda_info = rule(
    implementation = _cuda_info_impl,
    attrs = {
        "compiler_files": attr.label_list(allow_files = True, mandatory = True),
        "cudadevrt": attr.label(allow_single_file = True, mandatory = True),
        "cudart_static": attr.label(allow_single_file = True, mandatory = True),
        "nvcc": attr.label(allow_single_file = True, mandatory = True),
        "nvcc_version": attr.string(mandatory = True),
        "nvshmem_device": attr.label(allow_single_file = True, mandatory = True),
        "nvshmem_host": attr.label(allow_single_file = True, mandatory = True),
        "nvshmem_version": attr.string(mandatory = True),
    },
)

_BUILD = """\
load("@deepep//tools/build:cuda.bzl", "cuda_info")

package(default_visibility = ["//visibility:public"])

cuda_info(
    name = "toolkit",
    compiler_files = glob(
        [
            "cuda/bin/**",
            "cuda/include/**",
            "cuda/nvvm/**",
            "nvshmem/include/**",
        ],
        exclude = [
            "**/* *",
            "cuda/bin/nsys*",
            "cuda/include/cccl/cub/**",
            "cuda/include/cccl/thrust/**",
        ],
    ),
    cudadevrt = "cuda/{lib}/libcudadevrt.a",
    cudart_static = "cuda/{lib}/libcudart_static.a",
    nvcc = "cuda/bin/nvcc",
    nvcc_version = "{nvcc_version}",
    nvshmem_device = "nvshmem/lib/libnvshmem_device.a",
    nvshmem_host = "nvshmem/lib/libnvshmem_host.so.3",
    nvshmem_version = "{nvshmem_version}",
)

# The host library with the bootstrap and transport plugins that it opens by name.
filegroup(
    name = "nvshmem_runtime",
    srcs = glob(["nvshmem/lib/*.so*"]),
)
"""

def _nvshmem_version(rctx):
    """'3.4.5', from the three numbers in NVSHMEM's version header."""
    numbers = {}
    for line in rctx.read("nvshmem/include/non_abi/nvshmem_version.h").split("\n"):
        words = line.split(" ")
        if len(words) == 3 and words[1].startswith("NVSHMEM_VENDOR_"):
            numbers[words[1]] = words[2]
    return ".".join([numbers["NVSHMEM_VENDOR_%s_VERSION" % part] for part in ["MAJOR", "MINOR", "PATCH"]])

def _cuda_of_nvshmem(rctx, wheels):
    """CUDA's major version that NVSHMEM was built for, or "" where nothing says it.

    Wheels have it in their names; an installation says which toolkit it was built with, in a folder
    such as cuda-12.4 or r13.0.
    """
    for name in wheels:
        if name.startswith("nvidia_nvshmem_cu"):
            return name[len("nvidia_nvshmem_cu"):]
    for word in rctx.read("nvshmem/include/non_abi/nvshmem_version.h").split(" "):
        if word.startswith("CUDA_HOME="):
            for folder in word.split("/"):
                number = folder.lstrip("-cudarv")
                if "." in number and number.replace(".", "").isdigit():
                    return number.split(".")[0]
    return ""

def _check_one_cuda(nvcc, built_for, home, nvshmem):
    """Device code of two major versions of CUDA does not link, or fails on the machine it runs on."""
    if built_for in ["", nvcc.split(".")[0]]:
        return
    fail("nvcc is %s (%s), but NVSHMEM (%s) was built for CUDA %s: both must be of one major version. Set %s to an NVSHMEM for CUDA %s, such as that of the package nvidia-nvshmem-cu%s, or %s to a toolkit %s." % (
        nvcc,
        "%s=%s" % (_CUDA_HOME, home) if home else "pinned wheels",
        "%s=%s" % (_NVSHMEM_HOME, nvshmem) if nvshmem else "pinned wheels",
        built_for,
        _NVSHMEM_HOME,
        nvcc.split(".")[0],
        nvcc.split(".")[0],
        _CUDA_HOME,
        built_for,
    ))

def _must_exist(rctx, path, variable):
    if not rctx.path(path).exists:
        fail("%s of @cuda is missing: check %s" % (path, variable))

def _cuda_toolkit_impl(rctx):
    home = rctx.os.environ.get(_CUDA_HOME, "")
    nvshmem = rctx.os.environ.get(_NVSHMEM_HOME, "")
    wheels = {
        name: pinned(wheel["dist"], wheel["version"], wheel["hashes"])
        for name, wheel in json.decode(rctx.attr.lock).items()
        if not (nvshmem if "nvshmem" in name else home)
    }
    if wheels:
        machine = foreign_machine(rctx)
        if machine:
            fail(("This machine is %s, and the CUDA wheels in third_party/cuda/lock.bzl are for " +
                  "x86_64 only. Set %s and %s to toolkits installed for it, or build host " +
                  "variants, which need none.") % (machine, _CUDA_HOME, _NVSHMEM_HOME))
        rctx.report_progress("pip install of %d CUDA wheels" % len(wheels))
        error = pip_install(rctx, wheels.values(), "wheels")
        if error:
            fail("pip could not install the CUDA wheels:\n" + error)
    rctx.symlink(home or "wheels/nvidia/cu13", "cuda")
    rctx.symlink(nvshmem or "wheels/nvidia/nvshmem", "nvshmem")
    _must_exist(rctx, "cuda/bin/nvcc", _CUDA_HOME)
    _must_exist(rctx, "nvshmem/lib/libnvshmem_device.a", _NVSHMEM_HOME)
    version = rctx.execute(["cuda/bin/nvcc", "--version"])
    if version.return_code:
        fail("nvcc does not run: " + version.stderr)
    nvcc_version = version.stdout.split(", V")[1].split("\n")[0]
    _check_one_cuda(nvcc_version, _cuda_of_nvshmem(rctx, wheels), home, nvshmem)
    rctx.file("WORKSPACE", "")
    rctx.file("BUILD", _BUILD.format(
        lib = "lib64" if rctx.path("cuda/lib64/libcudart_static.a").exists else "lib",
        nvcc_version = nvcc_version,
        nvshmem_version = _nvshmem_version(rctx),
    ))

_cuda_toolkit = repository_rule(
    implementation = _cuda_toolkit_impl,
    attrs = {"lock": attr.string(mandatory = True)},
    configure = True,
    environ = [_CUDA_HOME, _NVSHMEM_HOME, "DEEPEP_PYTHON"],
)

def cuda_toolkit(name, lock):
    """Declares the repository.

    Args:
      name: its name.
      lock: {NAME: {"dist", "version", "hashes"}}, made by tools/lock_wheels.py.
    """
    _cuda_toolkit(name = name, lock = json.encode(lock))
