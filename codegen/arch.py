"""What each architecture is and can do: one row of facts per architecture.

Read by codegen/variant.py and, through it, by templates. Knows nothing of topologies or variants.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated


@dataclass(frozen=True, slots=True)
class Arch:
    """Facts of one architecture; templates ask what it has, never which one it is.

    `python -m codegen explain` prints the meaning that each fact is annotated with.
    """

    name: Annotated[str, "The architecture's word in variant names."]
    header: Annotated[str, "Header with its primitives, as a repository path."]
    network_header: Annotated[str, "Header with its network, for variants that span nodes."]
    source_suffix: Annotated[str, "File name suffix of sources: which compiler reads them."]
    gencode: Annotated[str, "Value of nvcc's -gencode."]
    min_capability: Annotated[tuple[int, int], "Lowest compute capability; (0, 0): none needed."]
    warp_size: Annotated[int, "Threads that execute together."]
    max_shared_bytes: Annotated[int, "Most dynamic shared memory of a block, opted in; 0: none."]
    has_tma: Annotated[bool, "Bulk asynchronous copies between global and shared memory."]
    has_fp8_cvt: Annotated[bool, "An instruction that converts FP32 to FP8 e4m3."]


_ROWS = (
    Arch(
        name="host",
        header="kernels/device/arch/host.h",
        network_header="kernels/device/arch/host_network.h",
        source_suffix="cc",
        gencode="",
        min_capability=(0, 0),
        warp_size=1,
        max_shared_bytes=0,
        has_tma=False,
        has_fp8_cvt=False,
    ),
    # Shared memory is that of capability 8.0 (A100); 8.6 and 8.9 run the same code with 99 KiB.
    Arch(
        name="sm80",
        header="kernels/device/arch/sm80.cuh",
        network_header="kernels/device/arch/gpu_network.cuh",
        source_suffix="cu",
        gencode="arch=compute_80,code=[sm_80,compute_80]",
        min_capability=(8, 0),
        warp_size=32,
        max_shared_bytes=163 * 1024,
        has_tma=False,
        has_fp8_cvt=False,
    ),
    Arch(
        name="sm90",
        header="kernels/device/arch/sm90.cuh",
        network_header="kernels/device/arch/gpu_network.cuh",
        source_suffix="cu",
        gencode="arch=compute_90,code=[sm_90,compute_90]",
        min_capability=(9, 0),
        warp_size=32,
        max_shared_bytes=227 * 1024,
        has_tma=True,
        has_fp8_cvt=True,
    ),
)

ARCHS: Mapping[str, Arch] = MappingProxyType({row.name: row for row in _ROWS})
"""All architectures by name, in the order in which they are listed to people."""
