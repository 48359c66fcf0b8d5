"""What the doctor knows of a machine, and how it is gathered. Judges nothing."""

from __future__ import annotations

import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from deepep import host_library, registry
from deepep.doctor import nvidia
from deepep.doctor.machine import Machine
from deepep.doctor.nvidia import Gpu, Link
from deepep.errors import DeepEPError
from deepep.manifest import VariantEntry

_MPS_FOLDER = Path("/tmp", "nvidia-mps")  # As NVIDIA documents it.


@dataclass(frozen=True, slots=True)
class Torch:
    """An installed torch: its version, the CUDA it is for ("" for none), and GPUs it sees."""

    version: str
    cuda: str
    num_gpus: int


@dataclass(frozen=True, slots=True)
class Nic:
    """A port of an RDMA network card, as the kernel names it."""

    name: str
    link_layer: str
    state: str


@dataclass(frozen=True, slots=True)
class Facts:
    """One machine. A string that ends in _error is empty when there was none.

    Attributes:
        python, executable, processor: the interpreter.
        runtime_error: why deepep._runtime cannot be imported.
        torch, torch_error: torch, or why it cannot be imported.
        driver, driver_cuda: version of NVIDIA's driver and the newest CUDA it supports; "" if none.
        gpus, links: GPUs, and how each pair of them is joined.
        visible_gpus: CUDA_VISIBLE_DEVICES, None if not set.
        mps: the Multi-Process Service runs.
        sharing_error: why processes cannot open each other's memory.
        pid_namespace: identity of the namespace that this process's id belongs to.
        memory_bytes, free_bytes, limit_bytes: the machine's memory and the container's limit (0:
            none).
        nvshmem, nvshmem_folder: host library of NVSHMEM, "" if not installed.
        nics: RDMA ports.
        peer_mapping: the driver lets network cards be rung from a GPU (IBGDA).
        gdrcopy, peermem, fabric: kernel modules and devices for traffic between nodes.
        libraries, libraries_error: kernel libraries that can be selected.
        changed_libraries: which of them are not the files that were built, in words.
        pins, pins_error: what DEEPEP_PIN limits the choice to, and what is wrong with it.
    """

    python: str = ""
    executable: str = ""
    processor: str = ""
    runtime_error: str = ""
    torch: Torch | None = None
    torch_error: str = ""
    driver: str = ""
    driver_cuda: str = ""
    gpus: tuple[Gpu, ...] = ()
    links: tuple[Link, ...] = ()
    visible_gpus: str | None = None
    mps: bool = False
    sharing_error: str = ""
    pid_namespace: str = ""
    memory_bytes: int = 0
    free_bytes: int = 0
    limit_bytes: int = 0
    nvshmem: str = ""
    nvshmem_folder: str = ""
    nics: tuple[Nic, ...] = ()
    peer_mapping: bool = False
    gdrcopy: bool = False
    peermem: bool = False
    fabric: bool = False
    libraries: tuple[VariantEntry, ...] = ()
    libraries_error: str = ""
    changed_libraries: tuple[str, ...] = ()
    pins: tuple[str, ...] = ()
    pins_error: str = ""


def gather(machine: Machine) -> Facts:
    """Looks at a machine."""
    torch, torch_error = _torch(machine)
    libraries, libraries_error = _libraries()
    pins, pins_error = _pins(libraries)
    driver, driver_cuda = nvidia.driver(machine)
    nvshmem = next(filter(None, map(machine.package, host_library.PACKAGES)), ("", ""))
    params = machine.read("/proc/driver/nvidia/params") or ""
    memory = machine.read("/proc/meminfo") or ""
    mps_folder = machine.environment().get("CUDA_MPS_PIPE_DIRECTORY", str(_MPS_FOLDER))
    return Facts(
        python=platform.python_version(),
        executable=sys.executable,
        processor=platform.machine(),
        runtime_error=_import_error(machine, "deepep._runtime"),
        torch=torch,
        torch_error=torch_error,
        driver=driver,
        driver_cuda=driver_cuda,
        gpus=nvidia.gpus(machine),
        links=nvidia.links(machine),
        visible_gpus=machine.environment().get("CUDA_VISIBLE_DEVICES"),
        mps=machine.exists(f"{mps_folder}/control"),
        sharing_error=machine.sharing_error() or "",
        pid_namespace=machine.link("/proc/self/ns/pid") or "",
        memory_bytes=_kib(memory, "MemTotal"),
        free_bytes=_kib(memory, "MemAvailable"),
        limit_bytes=_limit(machine),
        nvshmem=nvshmem[0],
        nvshmem_folder=nvshmem[1],
        nics=_nics(machine),
        peer_mapping="PeerMappingOverride=1" in params,
        gdrcopy=machine.exists("/dev/gdrdrv"),
        peermem=machine.exists("/sys/module/nvidia_peermem"),
        fabric=bool(machine.names("/dev/nvidia-caps-imex-channels")),
        libraries=libraries,
        libraries_error=libraries_error,
        changed_libraries=_changed(libraries),
        pins=pins,
        pins_error=pins_error,
    )


def _import_error(machine: Machine, name: str) -> str:
    try:
        machine.module(name)
    except Exception as error:  # Broken installations raise anything.
        return str(error) or type(error).__name__
    return ""


def _torch(machine: Machine) -> tuple[Torch | None, str]:
    error = _import_error(machine, "torch")
    if error:
        return None, error
    torch = machine.module("torch")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Torch(torch.__version__, torch.version.cuda or "", num_gpus), ""


def _libraries() -> tuple[tuple[VariantEntry, ...], str]:
    try:
        return registry.variants(), ""
    except DeepEPError as error:
        return (), str(error)


def _changed(libraries: tuple[VariantEntry, ...]) -> tuple[str, ...]:
    found = []
    for entry in libraries:
        try:
            registry.verify(entry)
        except DeepEPError as error:
            found.append(str(error))
    return tuple(found)


def _pins(libraries: tuple[VariantEntry, ...]) -> tuple[tuple[str, ...], str]:
    try:
        pins = registry.active_pins()
        registry.allowed(libraries, pins)
    except (DeepEPError, ValueError) as error:
        return (), str(error)
    return tuple(map(str, pins)), ""


def _kib(text: str, key: str) -> int:
    found = re.search(rf"^{key}:\s*(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _limit(machine: Machine) -> int:
    """The memory limit of the control group, of either version; 0 for none."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = (machine.read(path) or "").strip()
        # Version 1 writes "none" as a number near 2^63.
        if text.isdigit() and int(text) < 1 << 60:
            return int(text)
    return 0


def _nics(machine: Machine) -> tuple[Nic, ...]:
    root = "/sys/class/infiniband"
    nics = []
    for name in machine.names(root):
        for port in machine.names(f"{root}/{name}/ports"):
            layer, state = (
                (machine.read(f"{root}/{name}/ports/{port}/{fact}") or "unknown").strip()
                for fact in ("link_layer", "state")
            )
            nics.append(Nic(f"{name}/{port}", layer, state.rpartition(": ")[2]))
    return tuple(nics)
