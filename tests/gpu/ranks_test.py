"""The tests' own machinery: what is told of jobs that fail, die, hang or come too late. No GPU."""

import os
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from deepep import Buffer

from tests.gpu.ranks import Job, Rank, run_all


def _meet(rank: Rank) -> None:
    rank.barrier()
    assert rank.size == rank.group.size()


def _fail(rank: Rank) -> None:
    rank.barrier()
    assert rank.index != 1, "rank 1 dislikes it"


def _die(rank: Rank) -> None:
    if rank.index == 1:
        os._exit(9)
    rank.barrier()


def _hang(rank: Rank) -> None:
    while rank.index == 0:
        time.sleep(0.1)


def _send(rank: Rank) -> None:
    """A Buffer among the ranks of the job, which may be fewer than there are processes."""
    ids = torch.tensor([[(rank.index + 1) % rank.size]])
    with Buffer(rank.group, device="cpu", timeout=20) as buffer:
        layout = buffer.get_dispatch_layout(ids, rank.size)
        x = torch.full((1, 8), float(rank.index), dtype=torch.bfloat16)
        received = buffer.dispatch(x, None, layout[0], None, layout[3], layout[2])[0]
    assert isinstance(received, torch.Tensor)
    assert received.tolist() == [[float((rank.index - 1) % rank.size)] * 8]


def _decline(rank: Rank) -> None:
    pytest.skip("this machine has none")


def _dawdle(rank: Rank) -> None:
    time.sleep(2)


# As on_ranks leaves them in their module.
meet, send, fail, die, hang, decline, dawdle = (
    SimpleNamespace(body=body) for body in (_meet, _send, _fail, _die, _hang, _decline, _dawdle)
)


def jobs(*names: str) -> tuple[Job, ...]:
    """Of "function@number of ranks"; two where none is said."""
    parts = [name.partition("@") for name in names]
    return tuple(Job(__name__, name, int(count or 2), "sm90", "") for name, _, count in parts)


def troubles(results: dict[Job, Any]) -> dict[str, str]:
    return {f"{job.function}@{job.count}": went.trouble for job, went in results.items()}


def test_jobs_of_different_numbers_of_ranks_share_processes() -> None:
    results = run_all(jobs("meet@1", "send@2", "meet@3", "send@3"), 60)
    assert troubles(results) == {"meet@1": "", "send@2": "", "meet@3": "", "send@3": ""}
    assert all(went.seconds > 0 for went in results.values())


def test_a_failure_is_told_by_rank_and_the_next_job_runs(capfd: pytest.CaptureFixture[str]) -> None:
    told = troubles(run_all(jobs("fail", "meet"), 60))
    watched = capfd.readouterr().err
    assert "1/2 FAILED" in watched and "2/2 ok" in watched, "in the same processes"
    assert "rank 1: AssertionError: rank 1 dislikes it" in told["fail@2"]
    assert "rank 0" not in told["fail@2"] and told["meet@2"] == ""


def test_what_all_ranks_decline_is_skipped_with_the_reason() -> None:
    (went,) = run_all(jobs("decline"), 60).values()
    assert (went.trouble, went.skipped) == ("", "skipped: this machine has none")


def test_after_a_death_the_rest_runs_in_new_processes() -> None:
    told = troubles(run_all(jobs("die", "meet"), 60))
    assert "rank 1 did not finish" in told["die@2"] and "exit code 9" in told["die@2"]
    assert told["meet@2"] == ""


def test_a_job_that_hangs_is_ended_with_its_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPEP_GPU_JOB_SECONDS", "2")
    told = troubles(run_all(jobs("hang", "meet"), 60))
    assert "rank 0 did not finish" in told["hang@2"] and "in _hang" in told["hang@2"]
    assert told["meet@2"] == ""


def test_no_job_begins_when_time_is_up(tmp_path: Any) -> None:
    """What was done before is in the file by then."""
    progress = tmp_path / "progress.jsonl"
    with mock.patch.dict(os.environ, {"DEEPEP_GPU_PROGRESS": str(progress)}):
        told = troubles(run_all(jobs("dawdle@1", "meet@2"), 1.5))
    assert told == {"dawdle@1": "", "meet@2": "was not begun within 1.5 s"}
    assert '"test": "dawdle[sm90-1]"' in progress.read_text()
