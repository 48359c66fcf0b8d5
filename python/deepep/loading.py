"""Loads kernel libraries, each compared with what its manifest says. Knows no torch."""

from __future__ import annotations

from deepep import _runtime, host_library, registry
from deepep.errors import KernelLoadError
from deepep.manifest import VariantEntry


def load(entry: VariantEntry) -> _runtime.Library:
    """Loads a kernel library that is what its manifest says.

    Raises:
        KernelLoadError: the file, what it says of itself, or a library that it needs does not fit.
    """
    registry.verify(entry)
    host_library.check(entry)
    _preload(entry)
    try:
        library = _runtime.Library(str(entry.path))
    except RuntimeError as error:
        raise KernelLoadError(
            f"{error}. Build it again: ./bazelw build //kernels:{entry.name}"
        ) from error
    for fact in ("name", "topology", "arch", "dtype", "hidden", "num_ranks", "num_nodes"):
        if library.facts[fact] != getattr(entry, fact):
            raise KernelLoadError(
                f"{entry.path} says {fact} {library.facts[fact]!r}, its manifest "
                f"{getattr(entry, fact)!r}; build both together: ./bazelw build "
                "//kernels:libraries"
            )
    return library


def _preload(entry: VariantEntry) -> None:
    """Makes the installed host library the one that a kernel library is linked with, wherever that
    lies: a library that is loaded already is found by its name."""
    found = host_library.installed() if host_library.is_needed(entry) else None
    if found is not None and found[2].exists():
        _runtime.preload(str(found[2]))
