"""The benchmark of the low-latency mode: its flags, bytes, tables and pictures, and a small run."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from absl import flags

from tools.bench import low_latency_traffic, options, plot, shapes, stats, table
from tools.bench.shapes import PHASES, Shape
from tools.bench.traffic import Flow

ROOT = Path(__file__).resolve().parents[2]
SMALL = Shape(
    ranks=2, tokens=3, hidden=256, topk=2, experts=3, arch="host", dtype="fp8", mode="low_latency"
)
FLOW = Flow(rows=[[1, 2], [0, 3]], sent=[2, 3])  # selections


def parsed(*words: str) -> Any:
    values: Any = cast(Any, flags).FlagValues()
    options.define(values)
    values(["bench", "--mode=low_latency", *words])
    return values


def test_the_mode_has_defaults_of_its_own_which_flags_replace() -> None:
    made = options.sweep(parsed(), "cpu")
    assert [shape.tokens for shape in made] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert {(s.experts, s.dtype, s.variant, s.mode) for s in made} == {
        (128, "fp8", "best", "low_latency")
    }
    made = options.sweep(parsed("--tokens=5", "--dtype=bf16,fp8", "--sms=4,8"), "cpu")
    assert [(s.tokens, s.dtype) for s in made] == [(5, "bf16"), (5, "fp8")]


def test_operations_are_those_of_the_mode() -> None:
    assert options.settings(parsed("--operations=dispatch_send"), "cpu").operations
    with pytest.raises(ValueError, match="--operations=layout: must be some of dispatch, combine"):
        options.settings(parsed("--operations=layout"), "cpu")
    assert SMALL.operations == tuple(shapes.LOW_LATENCY)
    bf16 = Shape(dtype="bf16", mode="low_latency")
    assert bf16.operations == ("dispatch", "dispatch_send", "dispatch_receive")
    generic = Shape(variant="generic", dtype="fp8", mode="low_latency")
    assert generic.pinned() == "_".join(["lowlatency", "sm90", "hany", "fp8", "rany"])


def test_selections_are_counted_by_the_rank_of_their_expert() -> None:
    ids = torch.tensor([[0, 2], [1, -1], [-1, -1]])  # rank 0 has two of three experts
    assert low_latency_traffic.selections(SMALL, ids) == ([2, 1], 2)


def test_bytes_of_whole_operations_and_of_their_phases() -> None:
    def of(name: str) -> list[int]:
        return low_latency_traffic.memory_bytes(name, SMALL, FLOW)

    ids, choices, row, message = 3 * 2 * 8, 3 * 2 * 12, 256 + 8, 16 + 256 + 16
    assert of("dispatch") == [ids + 2 * 512 + 1 * (row + 8), ids + 3 * 512 + 5 * (row + 8)]
    assert of("dispatch_send") == [ids + 2 * 512 + message, ids + 3 * 512 + 5 * message]
    assert of("dispatch_receive") == [message + row + 8, 5 * (message + row + 8)]
    assert of("combine_pool") == [choices + 4 * 512, choices + 8 * 512] == of("combine_zero_copy")
    assert of("combine_send") == [520 + 3 * 512, 5 * 520 + 3 * 512]
    assert of("combine_receive") == [choices + 6 * 512] * 2
    both = zip(of("combine_send"), of("combine_receive"), strict=True)
    assert of("combine_any") == [a + b for a, b in both]
    assert low_latency_traffic.v1_bytes("dispatch", SMALL, FLOW) == [3 * row] * 2
    assert low_latency_traffic.v1_bytes("combine_pool", SMALL, FLOW) == [3 * 512] * 2


def test_the_rank_that_was_done_first_counts() -> None:
    assert stats.fastest([[1, 5], [3, 2]]) == [1, 2]


def record(tokens: int) -> dict[str, Any]:
    summary = {"median": 12.34, "p10": 9.0, "p90": 20.0}
    us = {"whole": summary, "fastest": {"median": 5.67}, "rank0": summary, "floor": 1.5}
    return {
        "shape": {**SMALL.as_dict(), "tokens": tokens},
        "operation": "dispatch_send",
        "variant": "v",
        "us": us,
        "gb_per_s": {"v1": 0, "memory": 1},
        "of_ceiling": 0.25,
    }


def test_tables_and_pictures_have_the_fastest_rank_and_the_floor() -> None:
    records = [record(1), record(4)]
    _, headings, rows = table.columns(records)
    cells = dict(zip(headings, rows[0], strict=True))
    assert cells["us"] == "12.3 (9.0-20.0)" and "in a row" not in headings
    assert (cells["fastest"], cells["floor"], cells["of ceiling"]) == ("5.7", "1.5", "25%")
    lines = plot.series(records, "tokens")["dispatch_send"]
    assert lines == {"v": [(1, 5.67), (4, 5.67)], "floor, v": [(1, 1.5), (4, 1.5)]}


def test_a_small_run_measures_every_operation(tmp_path: Path) -> None:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    shape = ("--ranks=2", "--tokens=1,5", "--hidden=272", "--experts=5", "--topk=3")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tools.bench", "--mode=low_latency", "--device=cpu", *shape),
            *("--dtype=fp8,bf16", "--iterations=2", "--warmup=1", "--out=out.json"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{path}"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    seen = [(r["shape"]["tokens"], r["shape"]["dtype"], r["operation"]) for r in result["records"]]
    wanted = {
        (tokens, dtype, operation)
        for tokens in (1, 5)
        for dtype in shapes.DTYPES
        for operation in Shape(dtype=dtype, mode="low_latency").operations
    }
    assert set(seen) == wanted and len(seen) == len(wanted)
    for made in result["records"]:
        us = made["us"]
        assert 0 < us["fastest"]["median"] <= us["whole"]["median"] and us["floor"] > 0
        assert ("back_to_back" in us) == (made["operation"] not in PHASES)
    assert "--mode=low_latency" in result["command"] and "floor" in done.stdout
