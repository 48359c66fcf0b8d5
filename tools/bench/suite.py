"""All results that docs/performance.md shows of one GPU, in one run:

    python -m tools.bench.suite --folder=tools/bench/results --prefix=h200

One set of processes measures all parts. A part's file is written anew after every record, so that a
run that is cut, or ends by --time_limit, leaves what was measured. A shape that several parts have
is measured once.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from absl import app, flags
from deepep.testing import run_processes

from tools.bench import machine, options, table, worker
from tools.bench.ranks import Ranks
from tools.bench.shapes import DTYPES, LOW_LATENCY, OPERATIONS, Shape, sweep

VARIANT_PATH = "DEEPEP_VARIANT_PATH"
CALLS = ("dispatch_cached", "dispatch_whole", "combine_pool")  # what sweeps are about


class Part(NamedTuple):
    """What one file holds: its name, the axes that are swept, the operations."""

    name: str
    axes: dict[str, Sequence[Any]]
    operations: tuple[str, ...] = CALLS


_DECODING: dict[str, Sequence[Any]] = {
    "mode": ["low_latency"],
    "dtype": ["fp8"],
    "experts": [128],
    "tokens": [1 << power for power in range(9)],
}

PARTS = (
    Part("8_ranks", {"dtype": DTYPES}, tuple(OPERATIONS)),
    Part("low_latency", _DECODING, tuple(LOW_LATENCY)),
    Part("sm80", {"arch": ["sm80"], "dtype": DTYPES}, tuple(OPERATIONS)),
    Part("variants", {"dtype": DTYPES, "variant": ["best", "generic"]}),
    Part(
        "low_latency_variants",
        {**_DECODING, "tokens": [1, 128], "variant": ["best", "generic"]},
        ("dispatch", "combine_pool"),
    ),
    Part("sms", {"dtype": DTYPES, "sms": [4, 8, 12, 16]}),
    Part("tokens", {"dtype": DTYPES, "tokens": [1, 128, 1024, 4096, 8192]}),
    Part("skew", {"skew": ["uniform", "zipf", "hot"]}),
    Part("hidden", {"hidden": [2048, 2880, 4096, 7168]}),
)
AGGRESSIVE = Part("aggressive", {"arch": ["sm90", "sm80"]}, ("combine_pool", "combine_any"))


class Plan(NamedTuple):
    """What the ranks are told."""

    parts: list[tuple[str, tuple[str, ...], list[Shape]]]  # file, operations, shapes
    settings: worker.Options
    header: dict[str, Any]
    deadline: float  # time.monotonic(), which all processes share


def measure(group: Any, plan: Plan) -> list[str]:
    """Measures and writes all parts; returns the files that are not complete."""
    ranks = Ranks(group, plan.settings.device)
    torch.manual_seed(plan.settings.seed)
    top = worker.ceiling(ranks, plan.settings)
    known: dict[tuple[Shape, str], dict[str, Any]] = {}
    cut: list[str] = []
    for file, operations, shapes in plan.parts:
        records: list[dict[str, Any]] = []
        for shape in shapes:
            settings = replace(plan.settings, operations=operations)
            wanted = worker.chosen(shape, settings)
            left = tuple(name for name in wanted if (shape, name) not in known)
            # A rank alone must not decide: the others would wait for it. One shape is measured in
            # any case, so that a limit that is too short shows what it is too short for.
            if left and known and any(ranks.gather(time.monotonic() > plan.deadline)):
                cut.append(file)
                break
            if left:
                settings = replace(settings, operations=left)
                for record in worker.of_shape(ranks, shape, top, settings):
                    known[shape, record.get("operation", left[0])] = record
                    _write(ranks, file, plan, top, [*records, record])
            records += [known[shape, name] for name in wanted if (shape, name) in known]
            _write(ranks, file, plan, top, records)
    return cut


def _write(ranks: Ranks, file: str, plan: Plan, top: float, records: list[dict[str, Any]]) -> None:
    if ranks.rank > 0:
        return
    result = {
        **plan.header,
        "settings": {
            "iterations": plan.settings.iterations,
            "warmup": plan.settings.warmup,
        },
        "ceiling_gb_per_s": {str(ranks.size): top},
        "records": records,
    }
    unfinished = Path(file + ".part")
    unfinished.write_text(json.dumps(result, indent=1) + "\n")
    unfinished.replace(file)
    last = records[-1]
    took = f"{last['us']['whole']['median']:.0f} us" if "us" in last else "not measured"
    shape = ", ".join(f"{name} {value}" for name, value in last["shape"].items())
    print(f"{Path(file).stem}: {last.get('operation', '')} {took} ({shape})", file=sys.stderr)


def run(parts: Sequence[Part], base: Shape, values: Any, header: dict[str, Any]) -> list[str]:
    """Measures the parts in processes of their own; returns the files that are not complete."""
    folder = Path(values["folder"].value)
    folder.mkdir(parents=True, exist_ok=True)
    limit = values["time_limit"].value
    chosen = [
        (
            str((folder / f"{values['prefix'].value}_{part.name}.json").resolve()),
            part.operations,
            sweep(base, part.axes),
        )
        for part in parts
    ]
    settings = worker.Options(
        device="cpu" if base.arch == "host" else "cuda",
        iterations=values["iterations"].value,
        warmup=values["warmup"].value,
        progress=False,
    )
    plan = Plan(chosen, settings, header, time.monotonic() + limit)
    return run_processes(base.ranks, measure, plan, timeout=limit + 60)[0]


def main(argv: Sequence[str]) -> int:
    values: Any = flags.FLAGS
    try:
        device = options.choose_device(values["device"].value)
        names = [part.name for part in PARTS]
        if unknown := set(values["parts"].value) - set(names):
            raise ValueError(f"--parts={','.join(sorted(unknown))}: choose of {','.join(names)}.")
    except ValueError as error:
        print(f"suite: {error}", file=sys.stderr)
        return 2
    base = Shape(
        ranks=values["ranks"].value,
        tokens=values["tokens"].value,
        arch=options.choose_archs([], device)[0],
    )
    wanted = values["parts"].value or names
    parts = [part for part in PARTS if part.name in wanted]
    if device == "cpu":  # there is one architecture, and SMs mean nothing
        parts = [part for part in parts if part.name not in ("sm80", "sms")]
    machine.use_whole_share()
    facts = machine.facts(device, values["machine"].value)
    for warning in machine.warnings(device, base.ranks, base.sms, facts):
        print(f"suite: {warning}", file=sys.stderr)
    header = {"format": 1, "machine": facts, "command": "python -m tools.bench.suite"}
    cut = run(parts, base, values, header)
    if libraries := values["aggressive"].value:
        os.environ[VARIANT_PATH] = libraries  # the ranks' processes read it
        command = f"{header['command']} --aggressive={Path(libraries).name}"
        cut += run([AGGRESSIVE], base, values, {**header, "command": command})
    for file in sorted(Path(values["folder"].value).glob(f"{values['prefix'].value}_*.json")):
        result = json.loads(file.read_text())
        if result.get("command", "").startswith("python -m tools.bench.suite"):
            print(f"\n## {file.name}\n\n{table.text(result)}")
    for name in cut:
        print(f"suite: {Path(name).name} was cut by --time_limit", file=sys.stderr)
    return 1 if cut else 0


if __name__ == "__main__":
    os.chdir(os.environ.get("BUILD_WORKING_DIRECTORY", "."))
    base_shape = Shape()
    flags.DEFINE_string("folder", "tools/bench/results", "where the files are written")
    flags.DEFINE_string("prefix", "h200", "beginning of the files' names")
    flags.DEFINE_list("parts", [], f"which; empty: {','.join(part.name for part in PARTS)}")
    flags.DEFINE_string("machine", "", "name of the machine; empty: its GPU or CPU")
    flags.DEFINE_string(
        "aggressive", "", "folder of libraries built with --aggressive_ptx: measures these too"
    )
    flags.DEFINE_integer("ranks", base_shape.ranks, "each a process", lower_bound=1)
    flags.DEFINE_integer("tokens", base_shape.tokens, "of each rank", lower_bound=1)
    flags.DEFINE_integer("iterations", 20, "times that each call is measured", lower_bound=1)
    flags.DEFINE_integer("warmup", 3, "calls before that", lower_bound=1)
    flags.DEFINE_float(
        "time_limit", 300, "seconds; no shape but the first begins later", lower_bound=1
    )
    flags.DEFINE_enum("device", "auto", ["auto", "cpu", "cuda"], "auto: a GPU if there is one")
    app.run(main)
