"""Words the answer when nothing fits: what was asked, what there is, how to get it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import cast, get_args

from deepep.errors import UnsupportedConfigError
from deepep.manifest import VariantEntry
from deepep.nodes import Nodes
from deepep.topology import (
    ROW_ALIGNMENT_BYTES,
    Arch,
    PayloadType,
    Requirement,
    Topology,
)

_MAX_LISTED = 12

_NAME = re.compile(
    "(?P<topology>[a-z]+)_(?P<arch>[a-z0-9]+)_h(?P<hidden>any|[0-9]{1,18})_(?P<dtype>[a-z0-9]+)"
    "_r(?P<ranks>any|[0-9]{1,18}(x[0-9]{1,18})?)"
)
"""The grammar of names, by shape only; tools/gen_variants.py says what is legal."""


def several_machines(hosts: Sequence[str]) -> UnsupportedConfigError:
    """The refusal of a group that no network here joins."""
    listed = ", ".join(
        f"{host}: ranks {[r for r, h in enumerate(hosts) if h == host]}"
        for host in sorted(set(hosts))
    )
    return UnsupportedConfigError(
        f"The ranks of the group are on several machines ({listed}). On the CPU the network "
        "between nodes is memory of one machine, which ranks_per_node= makes act as several nodes; "
        "GPUs of several machines are joined by NVSHMEM (libnvshmem_host.so.3, from the package "
        "nvidia-nvshmem-cu13). Use GPUs, or make groups of ranks on one machine."
    )


def no_host_library(hosts: Sequence[str]) -> UnsupportedConfigError:
    """The refusal of GPUs on several nodes where their network's library is missing."""
    return UnsupportedConfigError(
        f"The ranks of the group are on several nodes ({len(set(hosts))} machines): between GPUs "
        "of several nodes rows travel through NVSHMEM, whose libnvshmem_host.so.3 is not "
        "installed. Run pip install nvidia-nvshmem-cu13, or make groups of ranks on one machine."
    )


def no_low_latency_network(nodes: Nodes) -> UnsupportedConfigError:
    """The refusal of the low-latency mode across nodes."""
    return UnsupportedConfigError(
        f"low_latency_mode=True with {nodes.num_nodes} nodes of {nodes.ranks_per_node} ranks: in "
        "this version low-latency operations need ranks that share memory. Make groups inside a "
        "node, or leave ranks_per_node out."
    )


def _asked(requirement: Requirement) -> str:
    nodes = f" nodes={requirement.num_nodes}" if requirement.topology == "internode" else ""
    return (
        f"topology={requirement.topology} arch={requirement.arch} hidden={requirement.hidden} "
        f"dtype={requirement.dtype} ranks={requirement.num_ranks}{nodes}"
    )


def build_command(requirement: Requirement) -> str:
    """The command that generates and builds the variant made for `requirement`."""
    return _command(requirement.variant_name) or ""


def _plain(numbers: str) -> str:
    """Numbers of a name without leading zeros, which no legal name has."""
    return "x".join(word if word == "any" else str(int(word)) for word in numbers.split("x"))


def _command(name: str) -> str | None:
    """The command that adds a variant to the table and builds it; None if this is no such name."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    return (
        f"./bazelw run //tools:gen_variants -- --hidden {_plain(found['hidden'])} "
        f"--dtype {found['dtype']} --ranks {_plain(found['ranks'])} "
        f"--arch {found['arch']} --topology {found['topology']}"
    )


def _broken_rule(name: str) -> str:
    """Why no variant can have this name, although it has the form of one; "" if one can."""
    found = _NAME.fullmatch(name)
    if found is None:
        return ""
    for what, words in (("topology", Topology), ("arch", Arch), ("dtype", PayloadType)):
        if found[what] not in get_args(words):
            listed = ", ".join(get_args(words))
            return f"{what} is {found[what]!r}; write one of {listed}."
    between_nodes = found["topology"] == "internode"
    ranks, _, nodes = found["ranks"].replace("any", "1x2" if between_nodes else "1").partition("x")
    asked = Requirement(
        topology=cast(Topology, found["topology"]),
        arch=cast(Arch, found["arch"]),
        hidden=ROW_ALIGNMENT_BYTES if found["hidden"] == "any" else int(found["hidden"]),
        dtype=cast(PayloadType, found["dtype"]),
        num_ranks=int(ranks) * int(nodes or 1),
        num_nodes=int(nodes or 1),
    )
    try:
        asked.check()
    except UnsupportedConfigError as error:
        return str(error)
    return ""


def _distance(entry: VariantEntry, requirement: Requirement) -> tuple[int, int, int, str]:
    """Orders variants by how much of the requirement they miss; the smallest is the nearest."""
    wrong_kind = (
        4 * (entry.topology != requirement.topology)
        + 2 * (entry.arch != requirement.arch)
        + (entry.dtype != requirement.dtype)
    )
    hidden_gap = abs(entry.hidden - requirement.hidden) if entry.hidden else 0
    ranks_gap = 0
    if entry.num_ranks:
        ranks_gap = abs(entry.num_ranks - requirement.ranks_per_node)
        ranks_gap += abs(entry.num_nodes - requirement.num_nodes)
    return wrong_kind, ranks_gap, hidden_gap, entry.name


def _ranks_of(entry: VariantEntry) -> str:
    if not entry.num_ranks:
        return "any number of ranks"
    return f"{entry.num_ranks} ranks" + (
        f" on each of {entry.num_nodes} nodes" if entry.topology == "internode" else ""
    )


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
        f"hidden {entry.hidden or 'any'} with {_ranks_of(entry)}"
        for entry in sorted(same, key=lambda e: (e.hidden, e.num_ranks, e.num_nodes))[:_MAX_LISTED]
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


def not_built(name: str, entries: Sequence[VariantEntry]) -> str:
    """What to say of a name that is not built: close names, and the command that would build it."""
    names = [entry.name for entry in entries]
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    near = f" Close names: {', '.join(close)}." if close else ""
    broken = _broken_rule(name)
    command = _command(name)
    if broken:
        cure = f"It cannot be built: {broken}"
    elif command:
        cure = f"To build it: {command}"
    else:
        cure = "docs/variants.md has the grammar of names."
    return f"not built ({len(names)} variants are).{near} {cure}"


def unknown_pin(name: str, entries: Sequence[VariantEntry]) -> UnsupportedConfigError:
    """The error for a pin that names a variant which is not built."""
    return UnsupportedConfigError(
        f"{name} is pinned but {not_built(name, entries)} Or change the pin (deepep.pin or "
        "DEEPEP_PIN); python -m deepep.variants lists what is built."
    )
