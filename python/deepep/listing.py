"""Lists the kernel libraries that can be selected, and explains one. Run as deepep.variants."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from deepep import refusal, registry
from deepep.errors import DeepEPError
from deepep.manifest import VariantEntry


def facts(entry: VariantEntry) -> dict[str, Any]:
    """What is known of a library without loading it, ready for JSON."""
    values = {
        field.name: getattr(entry, field.name)
        for field in dataclasses.fields(entry)
        if field.name not in ("directory", "library", "others")
    }
    values["toolchain"] = dict(entry.toolchain)
    values["kernels"] = [dataclasses.asdict(kernel) for kernel in entry.kernels]
    values["path"] = str(entry.path)
    values["others"] = [str(other.path) for other in entry.others]
    return values


def table(entries: Sequence[VariantEntry]) -> str:
    """A line for each library: name, size, the start of its sha256, folder."""
    if not entries:
        return "No kernel libraries: ./bazelw build //python:deepep builds the default ones.\n"
    wide = max(len(entry.name) for entry in entries)
    lines = []
    for entry in entries:
        size = f"{entry.library_bytes / 1024:.0f} KiB"
        hides = f" (before {len(entry.others)} more of this name)" if entry.others else ""
        start = entry.sha256[:12]
        lines.append(f"{entry.name:{wide}}  {size:>9}  {start}  {entry.directory}{hides}\n")
    return "".join(lines)


def _serves(entry: VariantEntry) -> str:
    hidden = f"hidden {entry.hidden}" if entry.hidden else "any hidden size"
    ranks = f"{entry.num_ranks} ranks" if entry.num_ranks else "any number of ranks"
    if entry.topology == "internode":
        ranks += f" on each of {entry.num_nodes or 'any number of'} nodes"
    return f"{hidden}, {entry.dtype} dispatch and bf16 combine, {ranks}"


def explain(name: str, entries: Sequence[VariantEntry]) -> str:
    """All about one library. Raises LookupError, with the cure, when it is not built."""
    entry = next((each for each in entries if each.name == name), None)
    if entry is None:
        raise LookupError(f"{name} is {refusal.not_built(name, entries)}")
    lines = {
        "serves": _serves(entry),
        "runs on": "the CPU" if entry.arch == "host" else f"GPUs of {entry.arch} and newer",
        "at run time": ", ".join(entry.generic_axes) or "nothing: every number is compiled in",
        "library": f"{entry.path}, {entry.library_bytes} bytes",
        "device code": f"{entry.device_code_bytes} bytes" if entry.device_code_bytes else "",
        "pin": f"{entry.name}@{entry.sha256}",
        "built with": ", ".join(f"{key} {value}" for key, value in sorted(entry.toolchain.items())),
        "file": _state(entry),
    }
    for other in entry.others:
        lines[f"hides {other.path}"] = "the folder that is searched first counts"
    text = "".join(f"{key:12} {value}\n" for key, value in lines.items() if value)
    return text + resources(entry)


def resources(entry: VariantEntry) -> str:
    """What each kernel takes, a line for each; empty for a library without GPU kernels."""
    if not entry.kernels:
        return ""
    names = [f"{kernel.unit} {kernel.kernel}" for kernel in entry.kernels]
    wide = max(map(len, names))
    lines = [f"{'kernel':{wide}}  registers  shared bytes  spilled bytes\n"]
    for name, kernel in zip(names, entry.kernels, strict=True):
        spilled = kernel.spill_store_bytes + kernel.spill_load_bytes
        lines.append(
            f"{name:{wide}}  {kernel.registers:9}  {kernel.shared_bytes:12}  {spilled:13}\n"
        )
    return "".join(lines)


def _state(entry: VariantEntry) -> str:
    try:
        registry.verify(entry)
    except DeepEPError as error:
        return str(error)
    return "unchanged since it was built"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m deepep.variants",
        description="Lists the kernel libraries that deepep can select.",
    )
    parser.add_argument("--explain", metavar="NAME", help="all about one library")
    parser.add_argument("--json", action="store_true", help="facts of all libraries as JSON")
    options = parser.parse_args(argv)
    try:
        entries = registry.variants()
        if options.explain is not None:
            print(explain(options.explain, entries), end="")
        elif options.json:
            print(json.dumps([facts(entry) for entry in entries], indent=2))
        else:
            print(table(entries), end="")
    except (DeepEPError, LookupError) as error:
        print(error.args[0], file=sys.stderr)
        return 1
    return 0
