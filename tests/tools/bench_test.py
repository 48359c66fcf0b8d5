"""The benchmark: counting of bytes, statistics, tables, flags, and one small run of it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from absl import flags

from tools.bench import machine, options, plot, report, shapes, stats, table, traffic
from tools.bench.shapes import Shape
from tools.bench.traffic import Flow

ROOT = Path(__file__).resolve().parents[2]
SMALL = Shape(ranks=2, tokens=3, hidden=64, topk=2, experts=4, arch="host")
FLOW = Flow(rows=[[1, 2], [0, 3]], sent=[2, 3])


# ---- Bytes


def test_v1_counts_payload_and_scales_of_received_rows_the_own_ones_included() -> None:
    fp8 = Shape(ranks=2, hidden=2880, dtype="fp8")
    assert traffic.v1_bytes(SMALL, FLOW) == [1 * 128, 5 * 128]
    assert traffic.v1_bytes(fp8, FLOW) == [2880 + 23 * 4, 5 * (2880 + 23 * 4)]


def test_memory_sees_each_sent_token_once_and_each_received_row_once() -> None:
    places = 3 * 2 * 4
    cached = traffic.memory_bytes("dispatch_cached", SMALL, FLOW)
    assert cached == [places + (2 + 1) * 128, places + (3 + 5) * 128]
    side = 2 * (8 + 4)
    whole = traffic.memory_bytes("dispatch_whole", SMALL, FLOW)
    assert whole[0] - cached[0] == 6 + places + 2 * side + 1 * (side + 4)
    worst = traffic.memory_bytes("dispatch_worst", SMALL, FLOW, capacity=6)
    assert [a - b for a, b in zip(worst, whole, strict=True)] == [5 * 16, 1 * 16]


def test_a_combine_reads_received_rows_and_writes_tokens_and_a_copy_costs_twice() -> None:
    pool = traffic.memory_bytes("combine_pool", SMALL, FLOW)
    assert pool == [24 + (1 + 3) * 128, 24 + (5 + 3) * 128]
    copied = traffic.memory_bytes("combine_any", SMALL, FLOW)
    assert [a - b for a, b in zip(copied, pool, strict=True)] == [2 * 128, 2 * 5 * 128]


def test_bytes_of_ranks_on_one_device_add_up() -> None:
    assert traffic.busiest([1, 2, 4], [0, 0, 0]) == 7
    assert traffic.busiest([1, 2, 4], [0, 1, 0]) == 5


# ---- Shapes and routings


@pytest.mark.parametrize(
    "change, text",
    [
        ({"topk": 5, "experts": 4}, "topk=5 with experts=4"),
        ({"hidden": 7}, "rows of 14 bytes.*multiple of 16"),
        ({"hidden": 8, "dtype": "fp8"}, "rows of 8 bytes"),
        ({"sms": 3}, "sms=3: must be even"),
        ({"dtype": "fp4"}, "dtype=fp4"),
        ({"skew": "even"}, "skew=even"),
        ({"ranks": 0}, "ranks=0: must be at least 1"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_numbers(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Shape(**change).check()


def test_a_sweep_is_every_combination_and_numbers_of_ranks_stay_together() -> None:
    made = shapes.sweep(SMALL, {"tokens": [1, 2], "ranks": [4, 2], "arch": ["sm90"]})
    assert [(shape.ranks, shape.tokens) for shape in made] == [(4, 1), (4, 2), (2, 1), (2, 2)]


def test_on_host_the_number_of_sms_makes_no_second_point() -> None:
    assert len(shapes.sweep(SMALL, {"sms": [4, 8]})) == 1


def test_routings_choose_distinct_experts_as_skewed_as_they_say() -> None:
    counts = {}
    for skew in shapes.SKEWS:
        shape = Shape(ranks=4, tokens=500, experts=64, topk=4, skew=skew)
        ids = shapes.route(shape, 1)
        assert torch.equal(ids, shapes.route(shape, 1)) and ids.shape == (500, 4)
        assert all(len(set(row)) == 4 for row in ids.tolist())
        counts[skew] = torch.bincount(ids.flatten(), minlength=64).sort(descending=True).values
    assert counts["uniform"][0] < 70 < 300 < counts["zipf"][0]
    assert int((counts["hot"] > 0).sum()) == 16


def test_a_hot_rank_with_too_few_experts_leaves_choices_empty() -> None:
    ids = shapes.route(Shape(ranks=4, tokens=5, experts=8, topk=4, skew="hot"), 0)
    assert bool((ids[:, :2] < 2).all()) and bool((ids[:, 2:] == -1).all())


# ---- Statistics and tables


def test_medians_percentiles_and_the_slowest_rank() -> None:
    assert stats.slowest([[1, 5], [3, 2]]) == [3, 5]
    summary = stats.summarize([5, 1, 2, 4, 3])
    assert (summary["median"], summary["min"], summary["max"]) == (3, 1, 5)
    assert (summary["p10"], summary["p90"]) == (1.4, 4.6)
    assert stats.rate(5000, 2) == 2.5 and stats.rate(1, 0) == 0


def record(**change: Any) -> dict[str, Any]:
    summary = {"median": 10.0, "p10": 9.0, "p90": 12.0}
    return {
        "shape": {**SMALL.as_dict(), **change},
        "operation": "layout",
        "variant": "intranode_host_hany_bf16_rany",
        "us": {"whole": summary, "rank0": summary, "back_to_back": 8.0, "host": summary},
        "gb_per_s": {"v1": 0, "memory": 1},
        "of_ceiling": 0.5,
    }


RESULT: dict[str, Any] = {
    "format": 1,
    "machine": {"machine": "a GPU", "date": "2026-01-02T03", "deepep": "1", "device": "cpu"},
    "command": "python -m tools.bench",
    "ceiling_gb_per_s": {"2": 100.0},
    "records": [record(), record(tokens=64), {"shape": {}, "error": "no library"}],
}


def test_what_all_rows_share_is_said_once_above_the_table() -> None:
    common, headings, rows = table.columns(RESULT["records"])
    assert common["ranks"] == "2" and headings[:2] == ["operation", "tokens"]
    assert [row[1] for row in rows] == ["3", "64"] and "memcpy" not in headings
    lines = table.text(RESULT).splitlines()
    assert "10 (9-12)" in lines[6] and lines[-1] == "not measured: no library"
    assert len({line.find("10 (9-12)") for line in lines[6:8]}) == 1


def test_a_document_gets_its_tables_from_the_results(tmp_path: Path) -> None:
    (tmp_path / "here.json").write_text(json.dumps(RESULT))
    mark = "<!-- results: {} -->\nold\n<!-- end of results -->"
    document = report.fill(f"# A\n{mark.format('here.json')}\n{mark.format('gone.json')}", tmp_path)
    assert document.count("old") == 1 and "| operation | tokens |" in document
    assert report.fill(document, tmp_path) == document
    (tmp_path / "here.json").write_text('{"format": 2}')
    with pytest.raises(ValueError, match=r"here\.json is not a result of format 1 but 2"):
        report.fill(document, tmp_path)


def test_the_tables_of_the_document_are_those_of_the_results() -> None:
    document = (ROOT / "docs" / "performance.md").read_text()
    assert report.fill(document) == document, "run: python -m tools.bench.report --write ..."


def test_the_axis_of_a_picture_is_what_varies_most() -> None:
    records = [record(tokens=n, sms=m) for n in (1, 2, 3) for m in (4, 8)]
    assert plot.x_axis(records) == "tokens"
    assert plot.series(records, "tokens")["layout"]["4"] == [(1, 10.0), (2, 10.0), (3, 10.0)]


def test_without_matplotlib_a_picture_is_refused_with_the_cure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(plot.PlotError, match="pip install matplotlib"):
        plot.matplotlib()


# ---- The machine


def test_mps_is_seen_when_its_daemon_listens(tmp_path: Path) -> None:
    assert not machine.mps_is_running(tmp_path)
    os.mkfifo(tmp_path / "control")
    assert not machine.mps_is_running(tmp_path), "left behind by a daemon that is gone"
    reader = os.open(tmp_path / "control", os.O_RDONLY | os.O_NONBLOCK)
    assert machine.mps_is_running(tmp_path)
    os.close(reader)


# ---- The program


@pytest.fixture
def bench(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*flags: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(entry for entry in sys.path if entry)
        return subprocess.run(
            [sys.executable, "-m", "tools.bench", *flags],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{path}"},
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


def test_a_small_run_measures_every_operation(
    bench: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    done = bench(
        *("--device=cpu", "--ranks=1,2", "--tokens=9", "--hidden=512", "--experts=6", "--topk=2"),
        *("--iterations=2", "--warmup=1", "--out=out.json"),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    seen = {(r["shape"]["ranks"], r["shape"]["dtype"], r["operation"]) for r in result["records"]}
    wanted = {
        (ranks, dtype, operation)
        for ranks in (1, 2)
        for dtype in shapes.DTYPES
        for operation in Shape(dtype=dtype).operations
    }
    assert seen == wanted and len(result["records"]) == len(wanted)
    assert all(r["us"]["whole"]["median"] > 0 for r in result["records"])
    assert set(result["ceiling_gb_per_s"]) == {"1", "2"}
    words = result["command"].split()
    assert words[:3] == ["python", "-m", "tools.bench"] and len(words) == 3 + 8
    assert {"--ranks=1,2", "--iterations=2"} < set(words)
    assert "of memcpy" in done.stdout and "100%" in done.stderr


@pytest.mark.parametrize(
    "flag, text",
    [
        ("--tokens=1k", "--tokens=1k: must be whole numbers"),
        ("--topk=", "--topk is empty"),
        ("--operations=scatter", "--operations=scatter: must be some of layout"),
        ("--topk=64", "topk=64 with experts=256"),
        ("--arch=sm90", "--arch=sm90: this cpu runs host"),
    ],
)
def test_bad_flags_say_what_is_wrong(flag: str, text: str) -> None:
    values: Any = cast(Any, flags).FlagValues()
    options.define(values)
    values(["bench", flag])
    with pytest.raises(ValueError, match=text):
        options.sweep(values, "cpu")
        options.settings(values, "cpu")


def test_a_bad_flag_ends_the_program_in_a_line(
    bench: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = bench("--device=cpu", "--sms=5")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "bench: sms=5: must be even and at least 2, as in DeepEP.\n"
