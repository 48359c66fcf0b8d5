"""GPUs and the driver, from what nvidia-smi prints: it needs no torch and starts no context."""

from __future__ import annotations

import re
from dataclasses import dataclass

from deepep.doctor.machine import Machine

_COLUMNS = "index,name,compute_cap,memory.total,memory.free,compute_mode,mig.mode.current"
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU; its compute capability is (0, 0) when the driver does not tell."""

    index: int
    name: str
    capability: tuple[int, int]
    memory_bytes: int = 0
    free_bytes: int = 0
    compute_mode: str = "Default"
    mig: bool = False


@dataclass(frozen=True, slots=True)
class Link:
    """A pair of GPUs: whether each can read the other's memory, and by which way.

    `way` is nvidia-smi's word: NV18 for 18 NVLinks, PIX, PXB, PHB, NODE or SYS for PCIe.
    """

    first: int
    second: int
    peer_access: bool
    way: str

    @property
    def nvlink(self) -> bool:
        """Joined by NVLink."""
        return re.fullmatch(r"NV\d+", self.way) is not None


def driver(machine: Machine) -> tuple[str, str]:
    """Version of the driver and the newest CUDA that it supports; "" for what is not known."""
    text = machine.output(["nvidia-smi"]) or ""
    version = re.search(r"Driver Version\s*:\s*([\d.]+)", text)
    if version is None:
        loaded = machine.read("/proc/driver/nvidia/version") or ""
        version = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", loaded)
    cuda = re.search(r"CUDA (?:UMD )?Version\s*:\s*([\d.]+)", text)
    return version[1] if version else "", cuda[1] if cuda else ""


def gpus(machine: Machine) -> tuple[Gpu, ...]:
    """All GPUs of the machine, whatever CUDA_VISIBLE_DEVICES says."""
    query = [f"--query-gpu={_COLUMNS}", "--format=csv,noheader,nounits"]
    text = machine.output(["nvidia-smi", *query]) or ""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return tuple(_gpu(row) for row in rows if len(row) == len(_COLUMNS.split(",")))


def _gpu(row: list[str]) -> Gpu:
    index, name, capability, total, free, mode, mig = row
    major, _, minor = capability.partition(".")
    known = major.isdigit() and minor.isdigit()
    mebibytes = [int(cell) << 20 if cell.isdigit() else 0 for cell in (total, free)]
    return Gpu(
        index=int(index),
        name=name,
        capability=(int(major), int(minor)) if known else (0, 0),
        memory_bytes=mebibytes[0],
        free_bytes=mebibytes[1],
        compute_mode=mode,
        mig=mig == "Enabled",
    )


def links(machine: Machine) -> tuple[Link, ...]:
    """Each pair of GPUs once, the lower index first."""
    ways = matrix(machine.output(["nvidia-smi", "topo", "-m"]) or "")
    access = matrix(machine.output(["nvidia-smi", "topo", "-p2p", "r"]) or "")
    pairs = sorted(pair for pair in ways.keys() | access.keys() if pair[0] < pair[1])
    return tuple(
        Link(*pair, peer_access=access.get(pair) == "OK", way=ways.get(pair, "unknown"))
        for pair in pairs
    )


def matrix(text: str) -> dict[tuple[int, int], str]:
    """The cells between GPUs of a table that nvidia-smi topo prints; its legend is passed over."""
    lines = [_ESCAPES.sub("", line).split() for line in text.splitlines()]
    header = next((words for words in lines if words[:1] == ["GPU0"]), [])
    columns = [int(word[3:]) for word in header if re.fullmatch(r"GPU\d+", word)]
    cells = {}
    for words in lines:
        if words and words is not header and re.fullmatch(r"GPU\d+", words[0]):
            row = int(words[0][3:])
            for column, word in zip(columns, words[1:], strict=False):
                cells[row, column] = word
    return cells
