"""Runs every test that needs a GPU, without Bazel: python -m tools.gpu_check [--ranks 8]

Needs a built package and the repository on the PYTHONPATH, torch, pytest, absl-py:

    PYTHONPATH=DIR:. python -m tools.gpu_check --ranks 8 --arch sm90,sm80 --out results.json

DIR is what //tools:pack wrote. Ranks are processes; rank r uses device r modulo the number of
devices. Starts nothing else: for several ranks on one device CUDA MPS should be running already
(without it the tests pass, only slowly).

Every test is told when it is done, and a .jsonl file beside --out then has it too, so a run that is
cut loses nothing. No test begins when --time_limit has passed; a test that takes over a minute is
ended with its stacks, and the rest goes on in new processes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

ROOT = Path(__file__).resolve().parent.parent
ARCHS = ("sm90", "sm80")


class Recorder:
    """A pytest plugin that keeps what became of each test, and how long its ranks took."""

    def __init__(self) -> None:
        self.tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        # A test that fails or is skipped before its body has no report of the body.
        if report.when == "call" or report.outcome != "passed":
            self.tests[report.nodeid] = {
                "outcome": report.outcome,
                "seconds": round(dict(report.user_properties).get("seconds", report.duration), 2),
                "text": report.longreprtext if report.outcome == "failed" else _reason(report),
            }

    def counts(self) -> dict[str, int]:
        outcomes = [test["outcome"] for test in self.tests.values()]
        return {name: outcomes.count(name) for name in ("passed", "failed", "skipped")}


def _reason(report: Any) -> str:
    """Why a test was skipped."""
    return str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else ""


def pytest_arguments(expression: str) -> list[str]:
    """What pytest is called with; the source tree's unbuilt package must not be found first."""
    tests = ROOT / "tests" / "gpu"
    found = ["-o", f"pythonpath={ROOT}", "-p", "no:cacheprovider", "--rootdir", str(ROOT), "-q"]
    found += ["--capture=no", f"--ignore={tests / 'ranks_test.py'}"]  # that one needs no GPU
    return [*found, *(["-k", expression] if expression else []), str(tests)]


def main(argv: Sequence[str]) -> int:
    values: Any = flags.FLAGS
    archs, out = values["arch"].value, values["out"].value
    unknown = [arch for arch in archs if arch not in ARCHS]
    if unknown or not archs:
        print(f"gpu_check: --arch={','.join(unknown)}: choose of sm90,sm80.", file=sys.stderr)
        return 2
    import pytest

    # Read by tests/gpu/ranks.py when it is collected, here and in the ranks' processes.
    os.environ["DEEPEP_GPU_RANKS"] = str(values["ranks"].value)
    os.environ["DEEPEP_GPU_ARCHS"] = ",".join(archs)
    os.environ["DEEPEP_GPU_SECONDS"] = str(values["time_limit"].value)
    if values["debug_memory"].value:
        os.environ["PYTHONMALLOC"] = "debug"  # read when a process starts: the ranks' ones
        os.environ["MALLOC_PERTURB_"] = "90"
    if out:
        progress = Path(out).with_suffix(".jsonl")
        progress.write_text("")
        os.environ["DEEPEP_GPU_PROGRESS"] = str(progress.resolve())
    recorder = Recorder()
    status = int(pytest.main(pytest_arguments(values["filter"].value), plugins=[recorder]))
    counts = recorder.counts()
    if out:
        result = {"format": 1, "status": status, "counts": counts, "tests": recorder.tests}
        Path(out).write_text(json.dumps(result, indent=1) + "\n")
    print(", ".join(f"{count} {name}" for name, count in counts.items()))
    if status == 0 and not counts["passed"]:
        print("gpu_check: nothing ran; the reasons are above.", file=sys.stderr)
        return 1
    return status


if __name__ == "__main__":
    flags.DEFINE_integer("ranks", 8, "the largest number of ranks", lower_bound=1)
    flags.DEFINE_list("arch", list(ARCHS), "architectures of the kernels")
    flags.DEFINE_string("out", None, "JSON file to write: each test's outcome and what it said")
    flags.DEFINE_bool(
        "debug_memory", False, "ranks check the memory of Python's objects (PYTHONMALLOC=debug)"
    )
    flags.DEFINE_float("time_limit", 600, "seconds for all tests", lower_bound=1)
    flags.DEFINE_string("filter", "", "pytest's -k: only tests whose names fit")
    app.run(main)
