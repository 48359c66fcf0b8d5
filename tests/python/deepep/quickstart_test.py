"""The quickstart: a small run passes, planted errors fail it, and its parts do what they say."""

import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from deepep.errors import CommTimeoutError
from deepep.quickstart import launch, tables
from deepep.quickstart.batches import Batches
from deepep.quickstart.clock import Clock, ClockedBuffer
from deepep.quickstart.compare import compare, compare_all
from deepep.quickstart.model import run_experts
from deepep.quickstart.reference import moe_in_one_process
from deepep.quickstart.results import (
    LARGEST_ALLOWED,
    RMS_ALLOWED,
    Difference,
    Result,
    failures,
)
from deepep.quickstart.settings import TEXT, Settings

SMALL = Settings(ranks=2, steps=4, tokens=32, hidden=64, experts=8, topk=3, timeout=30)


# ---- Whole runs


def quickstart(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deepep.quickstart", *flags],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_a_small_run_passes_and_reports() -> None:
    flags = ["--ranks=3", "--steps=4", "--tokens=32", "--hidden=64", "--experts=8", "--topk=3"]
    done = quickstart(*flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""  # no warning, and no bar where there is no terminal
    for line in (
        "3 processes on the CPU with experts 0-2, 3-5, 6-7",
        "step    4 of 4  loss",
        "_bf16_r",  # a kernel library
        "rank  to 0  to 1  to 2  rows sent  received",
        "Load of the experts",
        "rows to the order of experts, and back",
        "gradient of combine (a dispatch)",
        "gradient of top-k weights",
        "PASSED in",
    ):
        assert line in done.stdout
    assert "WRONG" not in done.stdout


def lose_a_row(group: Any, settings: Settings) -> Result:
    """Rank 1 loses one token's sum in each forward combine."""
    combine = ClockedBuffer.combine

    def wrong(self: ClockedBuffer, *args: Any, **kwargs: Any) -> Any:
        result = combine(self, *args, **kwargs)
        if self.rank == 1 and "topk_weights" not in kwargs:
            result[0][5] = 0
        return result

    with mock.patch.object(ClockedBuffer, "combine", wrong):
        return launch.work(group, settings)


def lose_gradients_of_weights(group: Any, settings: Settings) -> Result:
    """The router learns nothing; the loss falls all the same."""
    combine = ClockedBuffer.combine

    def wrong(self: ClockedBuffer, *args: Any, **kwargs: Any) -> Any:
        combined, weights, event = combine(self, *args, **kwargs)
        return combined, None if weights is None else torch.zeros_like(weights), event

    with mock.patch.object(ClockedBuffer, "combine", wrong):
        return launch.work(group, settings)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (lose_a_row, "output of the layer before training differs"),
        (lose_gradients_of_weights, "gradient of router after training differs"),
    ],
)
def test_planted_errors_fail_a_run(body: Any, named: str, capsys: Any) -> None:
    assert launch.run(SMALL, body) == 1
    printed = capsys.readouterr()
    assert "WRONG" in printed.out and "PASSED" not in printed.out
    assert named in printed.err


def be_late(group: Any, settings: Settings) -> Result:
    if group.rank() == 1:
        raise CommTimeoutError("rank 0 did not come within 3 s")
    time.sleep(60)
    return Result()


def test_errors_of_the_package_are_told_without_a_traceback(capsys: Any) -> None:
    assert launch.run(SMALL, be_late) == 1
    assert capsys.readouterr().err == "FAILED: CommTimeoutError: rank 0 did not come within 3 s\n"


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        (
            "--hidden=12",
            "quickstart: --hidden is 12, which makes BF16 rows of 24 bytes, but a row must be a "
            "multiple of 16 bytes; use --hidden=16.\n",
        ),
        ("x", "quickstart: 'x' is no flag; flags are written --name=value, see --help.\n"),
    ],
)
def test_a_wrong_flag_is_told_in_one_line(flag: str, message: str) -> None:
    done = quickstart(flag)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


# ---- Settings and batches


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": 65}, "--ranks is 65, but must be 1 to 64; use --ranks=64."),
        ({"steps": 1}, "--steps is 1, but must be at least 2 .*; use --steps=2."),
        ({"experts": 3}, r"--experts is 3, but must be 4 to 4096 \(for 4 ranks\)"),
        ({"experts": 8, "topk": 9}, r"--topk is 9, but must be 1 to 8 \(of 8 experts\)"),
        ({"timeout": 0.0}, "--timeout is 0.0, but must be above 0"),
        ({"learning_rate": math.nan}, "--learning_rate is nan"),
        ({"text": "missing.txt"}, "--text is missing.txt, but it cannot be read: No such file"),
    ],
)
def test_settings_name_value_rule_and_cure(change: dict[str, Any], message: str) -> None:
    Settings().check()
    with pytest.raises(ValueError, match=message):
        replace(Settings(), **change).check()


def test_batches_are_places_in_the_text_and_differ_by_rank_and_step() -> None:
    text = TEXT.read_bytes()
    batches = Batches(SMALL)
    batch = batches.of(0, 3)
    for context, target in zip(batch.contexts, batch.targets, strict=True):
        assert bytes([*context.flip(0).tolist(), target.item()]) in text
    assert torch.equal(batch.contexts, Batches(SMALL).of(0, 3).contexts)
    assert not torch.equal(batch.contexts, batches.of(1, 3).contexts)
    assert not torch.equal(batch.contexts, batches.of(0, 4).contexts)


# ---- The comparison and the verdict


def test_a_step_of_bf16_is_allowed_and_anything_more_is_not() -> None:
    generator = torch.Generator().manual_seed(1)
    exact = torch.randn(64, 32, generator=generator)
    reference = exact.bfloat16()
    assert compare("x", reference.clone(), reference) == Difference("x", 64 * 32, 0.0, 0.0)
    step = reference.clone()
    step.view(torch.int16).view(-1)[reference.abs().argmax()] += 1
    assert compare("x", step, reference).ok
    assert not compare("x", reference, exact).ok  # a rounding too many
    lost = reference.clone()
    lost[7] = 0
    assert not compare("x", lost, reference).ok
    assert not compare("x", reference[torch.randperm(64, generator=generator)], reference).ok


def test_odd_tensors_are_compared_without_surprise() -> None:
    ones = torch.ones(2, 3)
    assert not compare("x", ones * math.nan, ones).ok
    assert not compare("x", ones, ones * math.nan).ok
    assert not compare("x", ones, ones * 0).ok
    assert compare("x", ones * 0, ones * 0).ok
    assert compare("x", ones[:0], ones[:0]) == Difference("x", 0, 0.0, 0.0)
    with pytest.raises(ValueError, match=r"x is \[2, 3\] on the ranks and \[3, 2\]"):
        compare("x", ones, ones.T)
    with pytest.raises(ValueError, match="compare the same tensors"):
        compare_all({"x": ones}, {"y": ones})


def test_the_verdict_needs_comparisons_and_a_falling_loss() -> None:
    good = Difference("output", 10, LARGEST_ALLOWED, RMS_ALLOWED)
    bad = [
        Difference("output", 10**6, largest, rms)
        for largest, rms in ((0.1, 0.0), (0.0, 0.001), (math.nan, 0.0), (0.0, math.nan))
    ]
    passed = Result(losses=[3.0, 2.0], before=[good], after=[good])
    assert failures([passed]) == []
    for wrong in bad:
        (failure,) = failures([replace(passed, after=[wrong])])
        assert failure.startswith("output after training differs")
    (failure,) = failures([replace(passed, before=[])])
    assert failure == "Nothing was compared before training."
    for losses in ([3.0, 3.0], [3.0, math.nan], [math.nan, 3.0]):
        (failure,) = failures([replace(passed, losses=losses)])
        assert failure.startswith("The loss did not fall")


# ---- Parts


def test_the_layer_in_one_process_equals_a_loop_over_tokens() -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(9, 16, generator=generator).bfloat16()
    ids = torch.rand(9, 6, generator=generator).argsort(1)[:, :3]
    weights = torch.rand(9, 3, generator=generator)
    up, down = (torch.randn(6, 16, 16, generator=generator) for _ in range(2))
    owners = [range(4), range(4, 6)]
    total = torch.zeros(9, 16)
    for token in range(9):
        for local in owners:  # rounded: each expert's result, each owner's sum, and the whole
            partial = torch.zeros(16)
            for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
                if expert in local:
                    inner = torch.nn.functional.gelu(rows[token].float() @ up[expert])
                    partial += weight * (inner @ down[expert]).bfloat16().float()
            total[token] += partial.bfloat16()
    found = moe_in_one_process(rows, ids, weights, up, down, owners)
    assert compare("rows", found, total.bfloat16()).ok


def test_experts_without_rows_stay_connected_for_backward() -> None:
    rows = torch.zeros(0, 16, dtype=torch.bfloat16, requires_grad=True)
    matrices = torch.zeros(4, 16, 16)
    y = run_experts(rows, [0] * 4, matrices, matrices)
    assert y.shape == (0, 16) and y.requires_grad


def test_an_inner_phase_counts_once() -> None:
    clock = Clock()
    with clock("outer"):
        time.sleep(0.02)
        with clock("inner"):
            time.sleep(0.05)
            assert clock.phase == "inner"
        assert clock.phase == "outer"
    assert 0.02 <= clock.seconds["outer"] < 0.05 <= clock.seconds["inner"]


def test_calls_of_a_module_are_a_phase_failed_ones_too() -> None:
    clock, module = Clock(), torch.nn.Linear(3, 2)
    clock.follow(module, "linear")
    assert clock.phase == "" and not clock.seconds
    module(torch.zeros(1, 3))
    first = clock.seconds["linear"]
    with clock("outer"), pytest.raises(RuntimeError):
        module(torch.zeros(1, 4))
    assert clock.phase == "" and 0 < first < clock.seconds["linear"]


def test_tables_are_aligned() -> None:
    assert tables.table(["rank", "rows"], [["0", "1200"], ["11", "7"]]) == (
        "  rank  rows\n  0     1200\n  11       7"
    )
    assert tables.spans([range(8), range(8, 9)]) == "0-7, 8"
    assert len(tables.bars([0, 1, 5], 5)) == 3 and len(tables.bars([0, 0], 0)) == 2
