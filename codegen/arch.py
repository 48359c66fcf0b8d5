"""What each architecture is and can do: one row of facts per architecture.

Read by codegen/variant.py and, through it, by templates. Knows nothing of topologies or variants.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


def fact(meaning: str, **options: Any) -> Any:
    """Declare a dataclass field with a meaning that `python -m codegen explain` prints."""
    return field(metadata={"meaning": meaning}, **options)


@dataclass(frozen=True, slots=True)
class Arch:
    """Facts of one architecture; templates ask what it has, never which one it is."""

    name: str = fact("The architecture's word in variant names.")
    header: str = fact("Header with its primitives, as a repository path.")
    source_suffix: str = fact("File name suffix of sources: which compiler reads them.")
    gencode: str = fact("Value of nvcc's -gencode.")
    min_capability: tuple[int, int] = fact("Lowest compute capability; 0 0: needs no GPU.")
    warp_size: int = fact("Threads that execute together.")
    max_shared_bytes: int = fact("Most dynamic shared memory of a block, opted in; 0: none.")
    has_tma: bool = fact("Bulk asynchronous copies between global and shared memory.")
    has_fp8_cvt: bool = fact("An instruction that converts FP32 to FP8 e4m3.")


_ROWS = (
    Arch(
        name="host",
        header="kernels/device/arch/host.h",
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
        source_suffix="cu",
        gencode="arch=compute_90a,code=sm_90a",
        min_capability=(9, 0),
        warp_size=32,
        max_shared_bytes=227 * 1024,
        has_tma=True,
        has_fp8_cvt=True,
    ),
)

ARCHS: Mapping[str, Arch] = MappingProxyType({row.name: row for row in _ROWS})
"""All architectures by name, in the order in which they are listed to people."""
