"""Command line of the doctor. Exit code 0: no problem, 1: one or more, 2: a wrong flag."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from typing import get_args

from deepep.doctor import checks, network, shape
from deepep.doctor.facts import Facts, gather
from deepep.doctor.finding import Finding
from deepep.doctor.machine import Machine
from deepep.listing import facts as library_facts
from deepep.topology import Arch, PayloadType, Topology

_MARKS = {"ok": "ok     ", "note": "note   ", "warning": "warning", "problem": "PROBLEM"}


def as_text(findings: Sequence[Finding]) -> str:
    """A line for each finding, and one for its cure if there is one to be had."""
    lines = []
    for finding in findings:
        lines.append(f"{_MARKS[finding.level]}  {finding.topic}: {finding.text}")
        if finding.remedy and finding.level != "ok":
            lines.append(f"           -> {finding.remedy}")
    problems = sum(finding.level == "problem" for finding in findings)
    lines.append(f"{problems} problem{'s' * (problems != 1)}")
    return "\n".join(lines)


def as_json(facts: Facts, findings: Sequence[Finding], chosen: str | None) -> str:
    """Findings, the library chosen for the shape, and all facts."""
    plain = {field.name: getattr(facts, field.name) for field in dataclasses.fields(facts)}
    plain["libraries"] = [library_facts(entry) for entry in facts.libraries]
    document = {
        "ok": all(finding.level != "problem" for finding in findings),
        "chosen": chosen,
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "facts": plain,
    }
    return json.dumps(document, indent=2, default=dataclasses.asdict)


def _ranks(text: str) -> tuple[int, int]:
    """Ranks and nodes, from 8 or from 8x4 as in names of variants."""
    found = re.fullmatch(r"([1-9][0-9]*)(?:x([1-9][0-9]*))?", text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r}: write 8, or 8x4 for 8 ranks on each of 4 nodes"
        )
    nodes = int(found[2] or 1)
    return int(found[1]) * nodes, nodes


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deepep.doctor",
        description="Says what of a machine deepep can use, and how to put right what it cannot.",
    )
    parser.add_argument("--json", action="store_true", help="findings and facts as JSON")
    asked = parser.add_argument_group("a shape: which library it would get")
    asked.add_argument("--hidden", type=int, help="elements of a token")
    asked.add_argument("--dtype", choices=get_args(PayloadType), default="bf16")
    asked.add_argument("--ranks", type=_ranks, default=(8, 1), help="8, or 8x4 for 4 nodes")
    asked.add_argument("--topology", choices=get_args(Topology), default="intranode")
    asked.add_argument("--arch", choices=get_args(Arch), help="default: the best that runs here")
    return parser


def main(argv: Sequence[str] | None = None, machine: Machine | None = None) -> int:
    """Runs the doctor on a machine, this one by default, and returns the exit code."""
    options = _parser().parse_args(argv)
    facts = gather(machine or Machine())
    findings = checks.examine(facts)
    arch = options.arch or shape.arch_for(facts)
    # On the CPU the network between nodes is memory.
    findings += network.examine(facts, options.topology == "internode" and arch != "host")
    chosen = None
    if options.hidden is not None:
        num_ranks, num_nodes = options.ranks
        asked = shape.Shape(
            options.hidden, options.dtype, num_ranks, options.topology, num_nodes, options.arch
        )
        found, chosen = shape.examine(facts, asked)
        findings += found
    print(as_json(facts, findings, chosen) if options.json else as_text(findings))
    return 1 if any(finding.level == "problem" for finding in findings) else 0


if __name__ == "__main__":
    sys.exit(main())
