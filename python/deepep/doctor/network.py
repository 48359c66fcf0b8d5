"""From facts to findings: what traffic between nodes of GPUs needs. Notes until it is asked for."""

from __future__ import annotations

from collections.abc import Iterator

from deepep.doctor.facts import Facts
from deepep.doctor.finding import Finding, Level

_PACKAGE = "nvidia-nvshmem-cu13"


def examine(facts: Facts, between_nodes: bool) -> list[Finding]:
    """Findings about NVSHMEM and network cards; problems only if nodes are to be joined."""
    return [*_nvshmem(facts, between_nodes), *_nics(facts, between_nodes)]


def _nvshmem(facts: Facts, needed: bool) -> Iterator[Finding]:
    built = sorted({entry.toolchain.get("nvshmem", "") for entry in facts.libraries} - {""})
    device = f"kernel libraries were built with {', '.join(built)}" if built else ""
    if not facts.nvshmem:
        text = "libnvshmem_host.so.3 is not installed; only traffic between nodes of GPUs needs it"
        text += f"; {device}" if built else ""
        level: Level = "problem" if needed else "note"
        yield Finding("NVSHMEM", level, text, f"pip install {_PACKAGE}{_version(built)}")
        return
    where = f"{facts.nvshmem} in {facts.nvshmem_folder}"
    others = [version for version in built if _release(version) != _release(facts.nvshmem)]
    if not others:
        yield Finding("NVSHMEM", "ok", f"{where}; {device or 'no kernel library needs it'}")
        return
    paths = [
        str(entry.path) for entry in facts.libraries if entry.toolchain.get("nvshmem") in others
    ]
    # Host and device part keep their state in common; a mixed pair fails late, or not visibly.
    yield Finding(
        "NVSHMEM",
        "problem" if needed else "warning",
        f"the host library is {where}, but {', '.join(paths)} was built with {', '.join(others)}",
        f"pip install {_PACKAGE}{_version(others)}, or build the libraries with the one installed "
        "(DEEPEP_NVSHMEM_HOME)",
    )


def _release(version: str) -> list[str]:
    """What host and device part must have in common, as deepep.host_library says."""
    return version.split(".")[:3]


def _version(built: list[str]) -> str:
    return f"=={built[-1]}" if built else ""


def _nics(facts: Facts, needed: bool) -> Iterator[Finding]:
    if not facts.nics:
        text = "no RDMA network card; only traffic between nodes of GPUs needs one"
        cure = "Give the container /dev/infiniband, or load the card's driver"
        yield Finding("network", "problem" if needed else "note", text, cure)
        return
    for nic in facts.nics:
        state: Level = "ok" if nic.state == "ACTIVE" else "warning"
        cure = "" if state == "ok" else "Check cable and switch (ibstat)"
        yield Finding("network", state, f"{nic.name}: {nic.link_layer}, {nic.state}", cure)
    yes_no = {True: "yes", False: "no"}
    ways = {
        "IBGDA (PeerMappingOverride)": facts.peer_mapping,
        "GDRCopy": facts.gdrcopy,
        "nvidia_peermem": facts.peermem,
        "fabric handles (IMEX)": facts.fabric,
    }
    text = ", ".join(f"{way}: {yes_no[there]}" for way, there in ways.items())
    cure = "For IBGDA: module option NVreg_RegistryDwords=PeerMappingOverride=1 of nvidia.ko"
    yield Finding("network", "ok" if facts.peer_mapping else "note", text, cure)
