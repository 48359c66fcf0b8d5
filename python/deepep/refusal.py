"""Words the answer when no kernel library fits: what was asked, what there is, how to get it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from deepep.errors import UnsupportedConfigError
from deepep.manifest import VariantEntry
from deepep.topology import Requirement

_MAX_LISTED = 12


def _asked(requirement: Requirement) -> str:
    nodes = f" nodes={requirement.num_nodes}" if requirement.topology == "internode" else ""
    return (
        f"topology={requirement.topology} arch={requirement.arch} hidden={requirement.hidden} "
        f"dtype={requirement.dtype} ranks={requirement.num_ranks}{nodes}"
    )


def build_command(requirement: Requirement) -> str:
    """The command that generates and builds the variant made for `requirement`."""
    return (
        f"./bazelw run //tools:gen_variants -- --hidden {requirement.hidden} "
        f"--dtype {requirement.dtype} --ranks {requirement.ranks_text} "
        f"--arch {requirement.arch} --topology {requirement.topology}"
    )


def _distance(entry: VariantEntry, requirement: Requirement) -> tuple[int, int, int, str]:
    """Orders variants by how much of the requirement they miss; the smallest is the nearest."""
    wrong_kind = (
        4 * (entry.topology != requirement.topology)
        + 2 * (entry.arch != requirement.arch)
        + (entry.dtype != requirement.dtype)
    )
    ranks_gap = abs(entry.num_ranks - requirement.num_ranks) if entry.num_ranks else 0
    hidden_gap = abs(entry.hidden - requirement.hidden) if entry.hidden else 0
    return wrong_kind, ranks_gap, hidden_gap, entry.name


def _built(entries: Sequence[VariantEntry], requirement: Requirement) -> str:
    same = [
        entry
        for entry in entries
        if (entry.arch, entry.dtype, entry.topology)
        == (requirement.arch, requirement.dtype, requirement.topology)
    ]
    kind = f"{requirement.topology} {requirement.arch} {requirement.dtype}"
    if not same:
        return f"Nothing is built for {kind}."
    shown = [
        f"hidden {entry.hidden or 'any'} with {entry.num_ranks or 'any number of'} ranks"
        for entry in sorted(same, key=lambda item: (item.hidden, item.num_ranks))[:_MAX_LISTED]
    ]
    more = f" and {len(same) - _MAX_LISTED} more" if len(same) > _MAX_LISTED else ""
    return f"Built for {kind}: {'; '.join(shown)}{more}."


def no_match(
    requirement: Requirement,
    entries: Sequence[VariantEntry],
    pins: Sequence[str],
    fits_without_pins: bool,
) -> UnsupportedConfigError:
    """The error for a requirement that no (allowed) library fits."""
    lines = [f"No kernel library for {_asked(requirement)}."]
    if pins:
        lines.append(f"Selection is limited by pins to {', '.join(pins)}.")
        if fits_without_pins:
            lines.append(
                "Without pins a built library would fit: deepep.unpin(), or change the pin."
            )
            return UnsupportedConfigError(" ".join(lines))
    if entries:
        nearest = sorted(entries, key=lambda entry: _distance(entry, requirement))[:3]
        lines.append(_built(entries, requirement))
        lines.append(f"Nearest: {', '.join(entry.name for entry in nearest)}.")
    else:
        lines.append("No kernel libraries are installed at all.")
    lines.append(f"To build {requirement.variant_name}: {build_command(requirement)}")
    return UnsupportedConfigError(" ".join(lines))


def unknown_pin(name: str, entries: Sequence[VariantEntry]) -> UnsupportedConfigError:
    """The error for a pin that names a variant which is not built."""
    names = [entry.name for entry in entries]
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    near = f" Close names: {', '.join(close)}." if close else ""
    return UnsupportedConfigError(
        f"{name} is pinned but not built ({len(names)} variants are).{near} Add it to "
        "kernels/variants.bzl and build //kernels:libraries, or change the pin (deepep.pin or "
        "DEEPEP_PIN). deepep.variants() lists what is built."
    )
