"""Which device and architecture a Buffer works on. An explicit choice is never replaced."""

from __future__ import annotations

import torch

from deepep import registry
from deepep.engine import Engine
from deepep.errors import UnsupportedConfigError
from deepep.groups import Communicator
from deepep.topology import Arch, runnable_archs


def _built() -> set[str]:
    return {entry.arch for entry in registry.variants()}


def gpu_arch(capability: tuple[int, int], wanted: Arch | None) -> Arch:
    """The architecture for a GPU of this compute capability.

    Raises:
        UnsupportedConfigError: `wanted` is none that it can run, or none that it can run is built.
    """
    runnable = runnable_archs(capability)
    name = f"compute capability {capability[0]}.{capability[1]}"
    if wanted is not None:
        if wanted not in runnable:
            raise UnsupportedConfigError(
                f"arch={wanted!r}: a device of {name} runs {', '.join(runnable) or 'none'}; pass "
                "one of these, or None."
            )
        return wanted
    built = _built()
    for arch in runnable:
        if arch in built:
            return arch
    raise UnsupportedConfigError(
        f"No kernel library for {name} is built; built are {', '.join(sorted(built)) or 'none'}. "
        "Build with ./bazelw build --kernels=gpu //python:deepep, or pass device='cpu'."
    )


def make_engine(
    comm: Communicator,
    device: torch.device | str | None,
    arch: Arch | None,
    timeout: float,
    use_fabric: bool = False,
    ranks_per_node: int | None = None,
) -> Engine:
    """The engine for `device`; None chooses a GPU where there is one that a built library fits.

    Raises:
        UnsupportedConfigError: the device is of no known kind, is not there, or nothing is built.
    """
    if device is None:
        has_gpu = torch.cuda.is_available() and bool(_built() & {"sm80", "sm90"})
        device = "cuda" if has_gpu and arch != "host" else "cpu"
    wanted = torch.device(device)
    if wanted.type == "cpu":
        if arch not in (None, "host"):
            raise UnsupportedConfigError(f"arch={arch!r} with device='cpu'; it has only 'host'.")
        return Engine(comm, "host", timeout, ranks_per_node)
    if wanted.type != "cuda":
        raise UnsupportedConfigError(f"device={str(wanted)!r}: must be 'cpu' or 'cuda'.")
    if not torch.cuda.is_available():
        raise UnsupportedConfigError(
            "device='cuda', but torch sees no GPU: torch.cuda.is_available() is False. Install a "
            "CUDA build of torch and a driver, or pass device='cpu'."
        )
    from deepep.cuda_engine import CudaEngine

    index = torch.cuda.current_device() if wanted.index is None else wanted.index
    chosen = gpu_arch(torch.cuda.get_device_capability(index), arch)
    return CudaEngine(comm, chosen, timeout, index, use_fabric, ranks_per_node)
