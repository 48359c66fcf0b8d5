"""Reads manifest.json, the list of kernel libraries in a folder. Used by the registry only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepep.errors import KernelLoadError
from deepep.topology import Requirement

FILE_NAME = "manifest.json"
FORMAT = 1
ABI_VERSION = 3
"""DEEPEP_ABI_VERSION of kernels/abi/deepep_kernel.h."""

_CURE = "Build package and libraries together: ./bazelw build //python:deepep."


@dataclass(frozen=True, slots=True)
class KernelResources:
    """What one kernel of a GPU library takes, as the compiler reports it.

    Attributes:
        kernel, unit: its name and the translation unit it is in.
        registers: of a thread.
        shared_bytes: static shared memory of a block.
        stack_bytes: of a thread's stack frame.
        spill_store_bytes, spill_load_bytes: registers that a thread keeps in memory; best 0.
    """

    kernel: str
    unit: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int


@dataclass(frozen=True, slots=True)
class VariantEntry:
    """One kernel library: a row of a manifest.

    Attributes:
        name: "intranode_host_h7168_bf16_r8".
        topology, arch, dtype: as in Requirement.
        hidden: elements of a row; 0: any.
        num_ranks: ranks of one memory domain; 0: any.
        num_nodes: memory domains; 0: any; 1 except for internode.
        library: file name within `directory`.
        sha256: of that file, in hexadecimal digits.
        directory: where manifest and library lie.
        library_bytes: size of the file; 0 when the manifest does not say.
        device_code_bytes: of that, code for GPUs.
        kernels: what each of its GPU kernels takes; empty for `host`.
        toolchain: what it was compiled with, such as {"nvcc": "13.0.88"}.
        others: libraries of the same name in folders that are searched later; they do not count.
    """

    name: str
    topology: str
    arch: str
    hidden: int
    dtype: str
    num_ranks: int
    num_nodes: int
    library: str
    sha256: str
    directory: Path
    library_bytes: int = 0
    device_code_bytes: int = 0
    kernels: tuple[KernelResources, ...] = ()
    toolchain: Mapping[str, str] = field(default_factory=dict, hash=False)
    others: tuple[VariantEntry, ...] = ()

    @property
    def path(self) -> Path:
        """The library file."""
        return self.directory / self.library

    @property
    def generic_axes(self) -> tuple[str, ...]:
        """Names of the values that are given at run time."""
        axes = []
        if self.hidden == 0:
            axes.append("hidden")
        if self.num_ranks == 0:
            axes.append("ranks")
        return tuple(axes)

    def fits(self, requirement: Requirement) -> bool:
        """Whether this library can serve `requirement`."""
        has_rows = self.dtype == requirement.dtype and self.hidden in (0, requirement.hidden)
        return has_rows and self.fits_ranks(requirement)

    def fits_ranks(self, requirement: Requirement) -> bool:
        """Whether it can, as far as rows do not matter."""
        if (self.topology, self.arch) != (requirement.topology, requirement.arch):
            return False
        ranks = (requirement.ranks_per_node, requirement.num_nodes)
        return self.num_ranks == 0 or (self.num_ranks, self.num_nodes) == ranks


def _entry(row: dict[str, Any], directory: Path) -> VariantEntry:
    library = str(row["library"])
    if Path(library).name != library:
        raise ValueError(f"library {library!r} is not a plain file name")
    return VariantEntry(
        name=str(row["name"]),
        topology=str(row["topology"]),
        arch=str(row["arch"]),
        hidden=int(row["hidden"]),
        dtype=str(row["dtype"]),
        num_ranks=int(row["num_ranks"]),
        num_nodes=int(row["num_nodes"]),
        library=library,
        sha256=str(row["sha256"]).lower(),
        directory=directory,
        library_bytes=int(row.get("library_bytes", 0)),
        device_code_bytes=int(row.get("device_code_bytes", 0)),
        kernels=tuple(KernelResources(**kernel) for kernel in row.get("kernels", [])),
        toolchain={str(key): str(value) for key, value in row.get("toolchain", {}).items()},
    )


def load(directory: Path) -> tuple[VariantEntry, ...]:
    """Reads the manifest of `directory`.

    Raises:
        KernelLoadError: it is missing, not a manifest, or of another format or ABI version.
    """
    path = directory / FILE_NAME
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise KernelLoadError(
            f"Cannot read {path}: {error.strerror}. A folder of kernel libraries holds "
            f"{FILE_NAME}; ./bazelw build //kernels:libraries makes one. Folders come from the "
            "package and from DEEPEP_VARIANT_PATH."
        ) from error
    except ValueError as error:
        raise KernelLoadError(f"{path} is not JSON: {error}. {_CURE}") from error
    if not isinstance(data, dict):
        raise KernelLoadError(f"{path} holds no JSON object. {_CURE}")
    for key, ours in (("format", FORMAT), ("abi_version", ABI_VERSION)):
        if data.get(key) != ours:
            raise KernelLoadError(
                f"{path} has {key} {data.get(key)!r}, this package reads {ours}. {_CURE}"
            )
    try:
        return tuple(_entry(row, directory) for row in data["variants"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise KernelLoadError(f"{path} has a malformed row: {error!r}. {_CURE}") from error
