"""Which library a shape would get on this machine, as a Buffer would choose it."""

from __future__ import annotations

from dataclasses import dataclass

from deepep import peers, registry
from deepep.doctor.facts import Facts
from deepep.doctor.finding import Finding
from deepep.errors import DeepEPError, UnsupportedConfigError
from deepep.topology import Arch, PayloadType, Requirement, Topology, runnable_archs


@dataclass(frozen=True, slots=True)
class Shape:
    """What a Buffer would be asked for; `arch` None means the best that is there."""

    hidden: int
    dtype: PayloadType
    num_ranks: int
    topology: Topology = "intranode"
    num_nodes: int = 1
    arch: Arch | None = None


def arch_for(facts: Facts) -> Arch:
    """The architecture that a Buffer takes when it is given none; see deepep.devices."""
    built = {entry.arch for entry in facts.libraries}
    if facts.torch and facts.torch.num_gpus and facts.gpus:
        for arch in runnable_archs(facts.gpus[0].capability):
            if arch in built:
                return arch
    return "host"


def examine(facts: Facts, shape: Shape) -> tuple[list[Finding], str | None]:
    """Findings about one shape, and the name of the library that it gets."""
    arch = shape.arch or arch_for(facts)
    requirement = Requirement(
        shape.topology, arch, shape.hidden, shape.dtype, shape.num_ranks, shape.num_nodes
    )
    findings = []
    chosen = None
    try:
        selection = registry.select(requirement)
        chosen = selection.entry.name
        how = "as asked for" if shape.arch else "the best that runs here"
        findings.append(Finding("shape", "ok", f"{selection.reason} (arch {arch}: {how})"))
    except (DeepEPError, ValueError) as error:
        # A refusal ends with its cure.
        text, _, command = str(error).partition(" To build ")
        cure = f"To build {command}"
        if not command:
            text, _, cure = text.rpartition(". ")
        findings.append(Finding("shape", "problem", text.removesuffix("."), cure))
    if arch != "host":
        findings += _placement(facts, shape, arch)
    return findings, chosen


def _placement(facts: Facts, shape: Shape, arch: Arch) -> list[Finding]:
    """Whether the machine's GPUs run `arch` and can form the memory domain."""
    able = [gpu.index for gpu in facts.gpus if arch in runnable_archs(gpu.capability)]
    reachable = {(link.first, link.second) for link in facts.links if link.peer_access}
    per_node = shape.num_ranks // shape.num_nodes
    try:
        peers.check_domain(per_node, able, reachable)
    except UnsupportedConfigError as error:
        text, _, cure = str(error).partition(". ")
        return [Finding("shape", "problem", text, cure)]
    domain = ", ".join(map(str, peers.largest_domain(able, reachable)[:per_node]))
    return [Finding("shape", "ok", f"one rank on each of GPUs {domain}")]
