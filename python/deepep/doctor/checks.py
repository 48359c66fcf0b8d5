"""From facts to findings: the package, the processes and memory, the GPUs and their libraries."""

from __future__ import annotations

from collections.abc import Iterator

from deepep.doctor.facts import Facts
from deepep.doctor.finding import Finding
from deepep.doctor.nvidia import Gpu
from deepep.topology import runnable_archs

_BUILD_PACKAGE = "./bazelw build //python:wheel, then install bazel-bin/python/*.whl"
_GIB = 1 << 30


def examine(facts: Facts) -> list[Finding]:
    """All findings about one machine, but for networks and shapes."""
    parts = (_package, _libraries, _processes, _driver, _gpus, _links)
    return [finding for part in parts for finding in part(facts)]


def _package(facts: Facts) -> Iterator[Finding]:
    yield Finding("python", "ok", f"{facts.python} for {facts.processor}, {facts.executable}")
    if facts.runtime_error:
        yield Finding(
            "runtime",
            "problem",
            f"deepep._runtime cannot be imported: {facts.runtime_error}",
            f"A build serves the Python that it was built for: {_BUILD_PACKAGE}",
        )
    if facts.torch is None:
        yield Finding(
            "torch",
            "problem",
            f"torch cannot be imported: {facts.torch_error}",
            "pip install torch; planning and the registry work without it, Buffer does not",
        )
        return
    built = f"built for CUDA {facts.torch.cuda}" if facts.torch.cuda else "built without CUDA"
    yield Finding("torch", "ok", f"{facts.torch.version}, {built}")


def _libraries(facts: Facts) -> Iterator[Finding]:
    if facts.libraries_error:
        cure = "Correct the folder, or take it out of DEEPEP_VARIANT_PATH"
        yield Finding("libraries", "problem", facts.libraries_error, cure)
    elif not facts.libraries:
        cure = f"{_BUILD_PACKAGE}; or name a folder of libraries in DEEPEP_VARIANT_PATH"
        yield Finding("libraries", "problem", "no kernel library is installed", cure)
    else:
        archs = [entry.arch for entry in facts.libraries]
        counts = ", ".join(f"{archs.count(arch)} for {arch}" for arch in sorted(set(archs)))
        yield Finding("libraries", "ok", f"{counts} (python -m deepep.variants lists them)")
    for text in facts.changed_libraries:
        cure = "As it says; until then a Buffer that needs this library refuses it"
        yield Finding("libraries", "problem", text, cure)
    if facts.pins_error and facts.libraries:
        cure = "Unset DEEPEP_PIN, or give it names that python -m deepep.variants lists"
        yield Finding("pins", "problem", facts.pins_error, cure)
    elif facts.pins:
        yield Finding("pins", "ok", f"DEEPEP_PIN limits the choice to {', '.join(facts.pins)}")
    for entry in facts.libraries:
        if entry.others:
            folders = ", ".join(str(other.directory) for other in entry.others)
            text = f"{entry.name} is taken from {entry.directory}, and not from {folders}"
            cure = "Nothing, if that is meant; else change the order in DEEPEP_VARIANT_PATH"
            yield Finding("libraries", "note", text, cure)


def _processes(facts: Facts) -> Iterator[Finding]:
    if facts.sharing_error:
        yield Finding(
            "processes",
            "problem",
            f"a process cannot open another's memory through /proc: {facts.sharing_error}",
            "Run all ranks as one user in one PID namespace (docker run --pid=..., one pod), with "
            "/proc mounted and not hidden (hidepid)",
        )
    else:
        text = f"share memory through /proc, in PID namespace {facts.pid_namespace or 'unknown'}"
        cure = "All ranks of a machine must show the same namespace here"
        yield Finding("processes", "ok", text, cure)
    limit = f", limited to {facts.limit_bytes / _GIB:.1f}" if facts.limit_bytes else ""
    text = f"{facts.free_bytes / _GIB:.1f} of {facts.memory_bytes / _GIB:.1f} GiB free{limit}"
    yield Finding("memory", "ok" if facts.memory_bytes else "note", text)


def _driver(facts: Facts) -> Iterator[Finding]:
    if not facts.driver:
        text = "no NVIDIA driver: only libraries for the host can run"
        yield Finding("driver", "note", text, "Install a driver to use GPUs (nvidia-smi shows it)")
        return
    yield Finding("driver", "ok", f"{facts.driver}, for CUDA up to {facts.driver_cuda or '?'}")
    # Within one major version older drivers run what newer compilers made.
    newest = _major(facts.driver_cuda)
    needed = {_major(entry.toolchain.get("nvcc", "")) for entry in facts.libraries} - {0}
    if newest and needed and max(needed) > newest:
        yield Finding(
            "driver",
            "problem",
            f"libraries were built by nvcc {max(needed)}.x, but driver {facts.driver} supports "
            f"CUDA {facts.driver_cuda}",
            f"Install a driver for CUDA {max(needed)}, or build with DEEPEP_CUDA_HOME of a CUDA "
            f"{newest} toolkit",
        )
    if facts.torch and facts.gpus and facts.torch.num_gpus == 0:
        hidden = facts.visible_gpus is not None
        text = f"torch sees none of the {len(facts.gpus)} GPUs"
        text += f"; CUDA_VISIBLE_DEVICES={facts.visible_gpus}" if hidden else ""
        cure = "Install a torch for this driver's CUDA (pip install torch)"
        yield Finding("torch", "problem", text, "Unset CUDA_VISIBLE_DEVICES" if hidden else cure)
    if facts.mps:
        text = "the Multi-Process Service runs; its clients share a fault: one that fails ends all"
        yield Finding("MPS", "note", text, "echo quit | nvidia-cuda-mps-control ends it")


def _major(version: str) -> int:
    first = version.partition(".")[0]
    return int(first) if first.isdigit() else 0


def _gpus(facts: Facts) -> Iterator[Finding]:
    built = {entry.arch for entry in facts.libraries}
    for gpu in facts.gpus:
        yield _gpu(gpu, built)
        if gpu.compute_mode.startswith("Prohibited"):
            text = f"GPU {gpu.index} has compute mode {gpu.compute_mode}: no process may use it"
            yield Finding("GPU", "problem", text, f"nvidia-smi -i {gpu.index} -c DEFAULT")
        if gpu.mig:
            text = f"GPU {gpu.index} is split by MIG: its parts cannot reach other GPUs"
            yield Finding("GPU", "warning", text, f"nvidia-smi -i {gpu.index} -mig 0")


def _gpu(gpu: Gpu, built: set[str]) -> Finding:
    capability = ".".join(map(str, gpu.capability))
    free = f"{gpu.free_bytes / _GIB:.0f} of {gpu.memory_bytes / _GIB:.0f} GiB free"
    text = f"GPU {gpu.index}: {gpu.name}, compute capability {capability}, {free}"
    runnable = runnable_archs(gpu.capability)
    usable = [arch for arch in runnable if arch in built]
    if not runnable:
        return Finding("GPU", "note", f"{text}; too old", "8.0 (A100) is the least; use the host")
    if not usable:
        cure = "./bazelw build --kernels=gpu //python:wheel"
        return Finding("GPU", "warning", f"{text}; no library for {' or '.join(runnable)}", cure)
    if usable[0] != runnable[0]:
        cure = "./bazelw build --kernels=gpu //python:wheel"
        return Finding("GPU", "warning", f"{text}; {usable[0]} runs, {runnable[0]} is better", cure)
    return Finding("GPU", "ok", f"{text}; runs {usable[0]}")


def _links(facts: Facts) -> Iterator[Finding]:
    apart = [f"({link.first}, {link.second})" for link in facts.links if not link.peer_access]
    if apart:
        text = f"these pairs of GPUs cannot reach each other's memory: {', '.join(apart)}"
        cure = (
            "Keep each domain to GPUs that can (--ranks N names them); see nvidia-smi topo -p2p r"
        )
        yield Finding("peers", "warning", text, cure)
    slow = [link for link in facts.links if link.peer_access and not link.nvlink]
    if slow:
        text = ", ".join(f"({link.first}, {link.second}) by {link.way}" for link in slow)
        yield Finding("peers", "note", f"pairs without NVLink: {text}", "PCIe works, more slowly")
    fast = sum(link.peer_access and link.nvlink for link in facts.links)
    if fast:
        yield Finding("peers", "ok", f"{fast} of {len(facts.links)} pairs of GPUs have NVLink")
