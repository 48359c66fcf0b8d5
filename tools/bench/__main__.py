"""Measures both modes of Buffer: ./bazelw run //tools:bench -- --help

Every rank is a process; on a GPU rank r uses device r modulo the number of devices. Prints a table,
and writes JSON (--out) and a picture (--plot). docs/performance.md explains the numbers.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import app, flags
from deepep.testing import run_processes

from tools.bench import machine, options, plot, table, worker
from tools.bench.shapes import Shape


def _add_kernels(records: list[dict[str, Any]], profiled: list[dict[str, Any]]) -> None:
    """Joins the kernels' times to the records they belong to."""
    for kernel in profiled:
        for record in records:
            same = (record["shape"], record.get("operation")) == (
                kernel["shape"],
                kernel["operation"],
            )
            if same and kernel["us"]:
                record["us"]["kernels"] = kernel["us"]


def _measure(
    shapes: Sequence[Shape], settings: worker.Options, result: dict[str, Any], values: Any
) -> None:
    """All shapes of one number of ranks; adds to the result."""
    num_ranks = shapes[0].ranks
    limit = values["timeout"].value
    made = run_processes(num_ranks, worker.run, shapes, settings, timeout=limit)[0]
    result["records"] += made["records"]
    result["ceiling_gb_per_s"][str(num_ranks)] = made["ceiling_gb_per_s"]
    if settings.device == "cuda" and values["kernels"].value:
        try:
            kernels = run_processes(num_ranks, worker.profile, shapes, settings, timeout=limit)[0]
        except (RuntimeError, TimeoutError) as error:
            print(f"bench: no times of kernels: {error}", file=sys.stderr)
        else:
            _add_kernels(result["records"], kernels)


def _without_repetition(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leaves out `generic` where the best variant is the generic one."""
    best = [r for r in records if r["shape"]["variant"] == "best"]
    seen = {(json.dumps({**r["shape"], "variant": ""}), r.get("variant")) for r in best}
    return [
        r
        for r in records
        if r["shape"]["variant"] == "best"
        or (json.dumps({**r["shape"], "variant": ""}), r.get("variant")) not in seen
    ]


def main(argv: Sequence[str]) -> int:
    values: Any = flags.FLAGS
    if len(argv) > 1:
        print(f"bench: unexpected {argv[1]!r}; all is said by flags, see --help", file=sys.stderr)
        return 2
    try:
        device = options.choose_device(values["device"].value)
        shapes = options.sweep(values, device)
        settings = options.settings(values, device)
        if values["plot"].value:
            plot.matplotlib()
        for name in ("out", "plot"):
            if values[name].value:  # refused now rather than after minutes
                Path(values[name].value).parent.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError, plot.PlotError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    machine.use_whole_share()
    facts = machine.facts(device, values["machine"].value)
    result: dict[str, Any] = {
        "format": 1,
        "machine": facts,
        "command": options.command(values),
        "settings": {"iterations": settings.iterations, "warmup": settings.warmup},
        "ceiling_gb_per_s": {},
        "records": [],
    }
    for num_ranks, group in itertools.groupby(shapes, key=lambda shape: shape.ranks):
        members = list(group)
        for sms in sorted({shape.sms for shape in members}):
            for warning in machine.warnings(device, num_ranks, sms, facts):
                print(f"bench: {warning}", file=sys.stderr)
        _measure(members, settings, result, values)
        result["records"] = _without_repetition(result["records"])
        if values["out"].value:  # after each number of ranks, so that a late failure costs less
            Path(values["out"].value).write_text(json.dumps(result, indent=1) + "\n")
    print(table.text(result))
    if values["plot"].value:
        plot.draw(result, Path(values["plot"].value))
    return 0 if any("error" not in record for record in result["records"]) else 1


if __name__ == "__main__":  # Not in the ranks' processes: they import this file again.
    # Bazel starts it elsewhere; paths in flags count from where Bazel was called.
    os.chdir(os.environ.get("BUILD_WORKING_DIRECTORY", "."))
    options.define()
    flags.adopt_module_key_flags(options)
    app.run(main)
