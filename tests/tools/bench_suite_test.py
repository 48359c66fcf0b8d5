"""The suite that makes the documents' result files: all of them, and what is left of a cut."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools.bench import report, suite

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    small = ["--device=cpu", "--ranks=2", "--tokens=4", "--iterations=2", "--warmup=1"]
    return subprocess.run(
        [sys.executable, "-m", "tools.bench.suite", f"--folder={folder}", *small, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=240,
    )


def result(folder: Path, part: str) -> dict[str, Any]:
    return report.load(folder / f"h200_{part}.json")


def test_every_table_of_the_document_has_its_part() -> None:
    document = (ROOT / "docs" / "performance.md").read_text()
    shown = set(re.findall(r"<!-- results: h200_(\w+)\.json -->", document))
    assert shown and shown <= {part.name for part in (*suite.PARTS, suite.AGGRESSIVE)}


def test_parts_are_files_that_the_report_reads(tmp_path: Path) -> None:
    done = run(tmp_path, "--parts=8_ranks,skew")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "h200_8_ranks.json",
        "h200_skew.json",
    ]
    first, skew = result(tmp_path, "8_ranks"), result(tmp_path, "skew")
    assert {record["shape"]["dtype"] for record in first["records"]} == {"bf16", "fp8"}
    assert [record["shape"]["skew"] for record in skew["records"]] == [
        kind for kind in ("uniform", "zipf", "hot") for _ in suite.CALLS
    ]
    for name in suite.CALLS:  # the shape that both have was measured once
        same = [
            next(r for r in part["records"] if r["operation"] == name) for part in (first, skew)
        ]
        assert same[0]["us"] == same[1]["us"]
    assert "dispatch_whole" in report.section(skew)


def test_what_was_measured_before_the_limit_is_kept(tmp_path: Path) -> None:
    done = run(tmp_path, "--parts=tokens", "--time_limit=1")
    assert done.returncode == 1 and "h200_tokens.json was cut by --time_limit" in done.stderr
    written = json.loads((tmp_path / "h200_tokens.json").read_text())
    assert [record["operation"] for record in written["records"]] == list(suite.CALLS)


def test_a_part_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "--parts=8_ranks,speed")
    assert done.returncode == 2 and "--parts=speed: choose of 8_ranks," in done.stderr
