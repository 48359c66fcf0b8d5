"""NVSHMEM's host library, which a kernel library between nodes was built for and meets at run time.

Host and device part keep their state in common; a mixed pair fails late, or not visibly, so it is
refused before the kernel library is loaded. Knows no torch.
"""

from __future__ import annotations

import importlib.metadata
import warnings
from pathlib import Path

from deepep import environment
from deepep.errors import KernelLoadError
from deepep.manifest import VariantEntry

PACKAGES = ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12")
"""Python packages that bring it, in the order in which they are looked for."""

_FILE = "nvidia/nvshmem/lib/libnvshmem_host.so.3"
_OVERRIDE = "DEEPEP_ALLOW_NVSHMEM_MISMATCH"


def installed() -> tuple[str, str, Path] | None:
    """Package, version and file of the host library that is installed; None if none is.

    An installation that is not a Python package has no version that could be read here.
    """
    for package in PACKAGES:
        try:
            found = importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        return package, found.version, Path(str(found.locate_file(_FILE)))
    return None


def is_needed(entry: VariantEntry) -> bool:
    """Whether a kernel library is linked with it."""
    return bool(entry.toolchain.get("nvshmem"))


def check(entry: VariantEntry) -> None:
    """Compares what a kernel library was built with and what is installed; called before a load.

    Raises:
        KernelLoadError: the versions differ; the text has both, both files and what to do.
        DEEPEP_ALLOW_NVSHMEM_MISMATCH=1 makes it a RuntimeWarning.
    """
    built = entry.toolchain.get("nvshmem", "")
    found = installed() if built else None
    if found is None:
        return
    package, version, file = found
    if version.split(".")[:3] == built.split(".")[:3]:
        return
    text = (
        f"{entry.path} was built with NVSHMEM {built}, but the host library {file} is {version}: "
        f"both must be the same. pip install {package}=={built}, or build the kernel libraries "
        "with the one installed (DEEPEP_NVSHMEM_HOME)"
    )
    if not environment.value(_OVERRIDE):
        raise KernelLoadError(f"{text}. {_OVERRIDE}=1 loads it all the same.")
    warnings.warn(f"{text}. Loaded because of {_OVERRIDE}.", RuntimeWarning, stacklevel=2)
