"""Chooses the kernel library: manifests -> entries -> select(requirement).

The only place that decides which library a Buffer uses and that knows where libraries lie. Knows
neither torch nor ctypes; loading is the runtime's work.

Libraries come with a manifest.json in `<package>/lib` and in the folders of DEEPEP_VARIANT_PATH
(separated by ':'), which are searched first. When a name occurs twice, the first one found counts,
unless a pin's sha256 names another; the selection's reason says which was taken before which.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deepep import environment, manifest, refusal
from deepep.errors import KernelLoadError
from deepep.manifest import VariantEntry
from deepep.topology import ROW_ALIGNMENT_BYTES, Arch, Requirement, Topology

PATH_VARIABLE = "DEEPEP_VARIANT_PATH"
PIN_VARIABLE = "DEEPEP_PIN"

__all__ = [
    "Pin",
    "Selection",
    "VariantEntry",
    "active_pins",
    "allowed",
    "pin",
    "search_directories",
    "select",
    "unpin",
    "variants",
    "verify",
]


@dataclass(frozen=True, slots=True)
class Pin:
    """A variant that selection is limited to; with `sha256`, one exact library file."""

    name: str
    sha256: str | None = None

    @classmethod
    def parse(cls, text: str) -> Pin:
        """Parses `name` or `name@sha256`. Raises ValueError for anything else."""
        name, at, digest = text.strip().partition("@")
        digest = digest.lower()
        well_formed = len(digest) == 64 and set(digest) <= set("0123456789abcdef")
        if not name or (at and not well_formed):
            raise ValueError(
                f"pin {text!r}: must be a variant's name, or name@sha256 with all 64 hexadecimal "
                "digits. deepep.variants() lists names and digests."
            )
        return cls(name, digest if at else None)

    def __str__(self) -> str:
        return self.name if self.sha256 is None else f"{self.name}@{self.sha256}"


@dataclass(frozen=True, slots=True)
class Selection:
    """A chosen library and, in words, why it was chosen."""

    entry: VariantEntry
    reason: str


_pins: tuple[Pin, ...] = ()
_lock = threading.Lock()


def pin(*names: str) -> None:
    """Limits later selections to these variants (`name` or `name@sha256`); replaces earlier pins.

    Takes precedence over the environment variable DEEPEP_PIN. Raises ValueError for a malformed
    one.
    """
    global _pins
    if not names:
        raise ValueError("pin() needs at least one variant name; unpin() removes all pins.")
    parsed = tuple(Pin.parse(name) for name in names)
    with _lock:
        _pins = parsed


def unpin() -> None:
    """Forgets what pin() set. DEEPEP_PIN, if set, applies again."""
    global _pins
    with _lock:
        _pins = ()


def active_pins() -> tuple[Pin, ...]:
    """The pins of pin(), else those of DEEPEP_PIN (separated by commas), else none."""
    if _pins:
        return _pins
    listed = environment.value(PIN_VARIABLE).split(",")
    return tuple(Pin.parse(item) for item in listed if item.strip())


def search_directories() -> tuple[Path, ...]:
    """Folders that are searched for libraries, first one first."""
    listed = environment.value(PATH_VARIABLE).split(":")
    extra = (Path(item) for item in listed if item)
    return tuple(dict.fromkeys((*extra, Path(__file__).parent / "lib")))


def variants(directories: Iterable[Path] | None = None) -> tuple[VariantEntry, ...]:
    """All libraries that can be selected, sorted by name; `others` of each are those it hides.

    Raises:
        KernelLoadError: a manifest is unreadable or of another version, or a folder named in
            DEEPEP_VARIANT_PATH has none.
    """
    searched = search_directories() if directories is None else tuple(directories)
    own = Path(__file__).parent / "lib"
    found: dict[str, list[VariantEntry]] = {}
    for directory in searched:
        # Without libraries the package still imports and plans; selection explains what is missing.
        if directory == own and not (directory / manifest.FILE_NAME).is_file():
            continue
        for entry in manifest.load(directory):
            found.setdefault(entry.name, []).append(entry)
    return tuple(replace(first, others=tuple(rest)) for _, (first, *rest) in sorted(found.items()))


def allowed(entries: Sequence[VariantEntry], pins: Sequence[Pin]) -> list[VariantEntry]:
    """The entries that `pins` allow; all of them without pins.

    Raises:
        UnsupportedConfigError: a pin names a variant that is not built.
        KernelLoadError: no library of that name has the pin's sha256.
    """
    if not pins:
        return list(entries)
    by_name = {entry.name: entry for entry in entries}
    chosen = []
    for wanted in pins:
        entry = by_name.get(wanted.name)
        if entry is None:
            raise refusal.unknown_pin(wanted.name, entries)
        chosen.append(entry if wanted.sha256 is None else _of_digest(entry, wanted.sha256))
    return chosen


def _of_digest(entry: VariantEntry, digest: str) -> VariantEntry:
    """The library of this name and digest, in whichever folder; raises when there is none."""
    same_name = (entry, *entry.others)
    for candidate in same_name:
        if candidate.sha256 == digest:
            others = tuple(other for other in same_name if other is not candidate)
            return replace(candidate, others=tuple(replace(other, others=()) for other in others))
    listed = " and ".join(f"{each.path} is listed with {each.sha256}" for each in same_name)
    raise KernelLoadError(
        f"{entry.name} is pinned to sha256 {digest}, but {listed}. Install the pinned build, or "
        f"change the pin (deepep.pin or {PIN_VARIABLE})."
    )


def _precedence(entry: VariantEntry, pinned: bool) -> str:
    """Why this library and not another of the same name; empty when there is just one."""
    if not entry.others:
        return ""
    passed = ", ".join(str(other.directory) for other in entry.others)
    why = "the pin's sha256 is its own" if pinned else f"{PATH_VARIABLE} is searched in order"
    return f"; taken from {entry.directory} and not from {passed}, since {why}"


def select(
    requirement: Requirement,
    pins: Sequence[Pin] | None = None,
    directories: Iterable[Path] | None = None,
) -> Selection:
    """Chooses the library for `requirement`: an exact one, else the one with fewest generic axes.

    With the same number of generic axes a fixed hidden size is worth more than a fixed number of
    ranks, because it unrolls the copy loops.

    Args:
        requirement: what is needed.
        pins: what the choice is limited to; None means active_pins().
        directories: where to look; None means search_directories().

    Raises:
        UnsupportedConfigError: the requirement breaks a rule that holds for all variants, no
            library fits it, or a pin names a variant that is not built.
        KernelLoadError: a manifest cannot be used, or a pinned sha256 differs.
    """
    requirement.check()
    pins = active_pins() if pins is None else pins
    entries = variants(directories)
    fitting = [entry for entry in allowed(entries, pins) if entry.fits(requirement)]
    if not fitting:
        unpinned = any(entry.fits(requirement) for entry in entries)
        raise refusal.no_match(requirement, entries, [str(p) for p in pins], unpinned)
    entry = min(fitting, key=lambda item: (len(item.generic_axes), item.hidden == 0, item.name))
    how = "exact match"
    if entry.generic_axes:
        how = f"generic {' and '.join(entry.generic_axes)}; {requirement.variant_name} is not built"
        if pins:
            how = f"generic {' and '.join(entry.generic_axes)}"
    limited = f", limited by pins {', '.join(map(str, pins))}" if pins else ""
    by_digest = any(each.name == entry.name and each.sha256 for each in pins)
    return Selection(entry, f"{entry.name}: {how}{limited}{_precedence(entry, by_digest)}")


def select_shapeless(
    topology: Topology, arch: Arch, num_ranks: int, num_nodes: int = 1
) -> Selection:
    """Chooses a library for what depends on no row: layout and the exchange of counts.

    Raises as select().
    """
    pins = active_pins()
    # Any legal row: a refusal then tells what is built.
    asked = Requirement(topology, arch, ROW_ALIGNMENT_BYTES, "bf16", num_ranks, num_nodes)
    entries = [entry for entry in allowed(variants(), pins) if entry.fits_ranks(asked)]
    if not entries:
        return select(asked)
    entry = min(entries, key=lambda item: (item.num_ranks == 0, item.name))
    return Selection(entry, f"{entry.name}: any library of {topology} {arch} serves")


def verify(entry: VariantEntry) -> None:
    """Compares the library file with its manifest row; called before it is loaded.

    Raises:
        KernelLoadError: the file is missing or its sha256 differs; the text has both digests.
    """
    cure = f"Build it again: ./bazelw build //kernels:{entry.name}, or reinstall the package."
    try:
        with entry.path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise KernelLoadError(
            f"Cannot read {entry.path}, which {manifest.FILE_NAME} lists: {error.strerror}. {cure}"
        ) from error
    if found != entry.sha256:
        raise KernelLoadError(
            f"{entry.path} was changed after it was built: its sha256 is {found}, the manifest "
            f"says {entry.sha256}. {cure}"
        )
