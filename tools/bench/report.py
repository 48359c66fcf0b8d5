"""Turns results into the tables of docs/performance.md.

    python -m tools.bench.report tools/bench/results/h200.json             a Markdown table
    python -m tools.bench.report tools/bench/results/h200.json --plot FILE.png
    python -m tools.bench.report --write docs/performance.md               all tables of a document

A document says where a table belongs; what stands between the two lines is replaced:

    <!-- results: h200.json -->
    <!-- end of results -->
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

from tools.bench import plot, table

# Resolved, so that `bazel run` too finds the source tree that its runfiles point to.
RESULTS = Path(__file__).resolve().parent / "results"

_MARKED = re.compile(r"(<!-- results: (\S+) -->\n).*?(<!-- end of results -->)", re.DOTALL)


def load(path: Path) -> dict[str, Any]:
    """A result file. Raises ValueError when it is something else."""
    result: dict[str, Any] = json.loads(path.read_text())
    if result.get("format") != 1:
        raise ValueError(
            f"{path.name} is not a result of format 1 but {result.get('format')!r}; make it again "
            "with python -m tools.bench --out."
        )
    return result


def section(result: dict[str, Any]) -> str:
    """One result: where and when, how to repeat it, the table."""
    common, headings, rows = table.columns(result["records"])
    machine = result["machine"]
    facts = [machine["machine"], machine["date"][:10]]
    facts += [f"{name} {machine[name]}" for name in ("driver", "torch") if machine.get(name)]
    if machine["device"] == "cuda":
        facts.append("CUDA MPS" if machine["mps"] else "no MPS")
    tops = [f"{top:.0f} GB/s with {size} ranks" for size, top in result["ceiling_gb_per_s"].items()]
    shape = ", ".join(f"{name} {value}" for name, value in common.items())
    return (
        f"{', '.join(facts)}. Copy ceiling: {', '.join(tops)}. In all rows: {shape}.\n\n"
        f"    {result['command']}\n\n{table.markdown(headings, rows)}\n"
    )


def fill(document: str, results: Path = RESULTS) -> str:
    """The document with every table made anew; a file that is not there leaves its place alone."""

    def replace(match: re.Match[str]) -> str:
        path = results / match[2]
        if not path.is_file():
            return match[0]
        return f"{match[1]}\n{section(load(path))}\n{match[3]}"

    return _MARKED.sub(replace, document)


def main(argv: Sequence[str]) -> int:
    values: Any = flags.FLAGS
    try:
        if values["write"].value:
            document = Path(values["write"].value)
            document.write_text(fill(document.read_text()))
        for name in argv[1:]:
            result = load(Path(name))
            print(section(result))
            if values["plot"].value:
                plot.draw(result, Path(values["plot"].value))
    except (OSError, ValueError, plot.PlotError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    # Bazel starts it elsewhere; paths count from where Bazel was called.
    os.chdir(os.environ.get("BUILD_WORKING_DIRECTORY", "."))
    flags.DEFINE_string("write", None, "document whose tables are replaced")
    flags.DEFINE_string("plot", None, "picture to write")
    app.run(main)
