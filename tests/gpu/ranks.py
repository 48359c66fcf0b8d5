"""Tests whose body runs on every rank, each a process on a GPU.

    @on_ranks(counts=(2, 8), choices=("a", "b"))
    def test_something(rank: Rank, choice: str) -> None:
        checks.round_trip(rank.buffer(), ...)

is a pytest test for each number of ranks, architecture and choice. Starting processes takes
seconds, so one set of them runs all the selected tests in turn, a test of fewer ranks on the first
ones, and pytest only looks up how each of them went.

    DEEPEP_GPU_RANKS      the largest number of ranks, default 8
    DEEPEP_GPU_ARCHS      architectures, default sm90,sm80
    DEEPEP_GPU_SECONDS    for all tests, start of the processes included
    DEEPEP_GPU_PROGRESS   file that gets a line of JSON as soon as a test is done
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from deepep import Buffer, registry
from deepep.testing import process_outcomes

COUNTS = (1, 2, 3, 4, 8)
MAX_RANKS = int(os.environ.get("DEEPEP_GPU_RANKS") or 8)
ARCHS = tuple((os.environ.get("DEEPEP_GPU_ARCHS") or "sm90,sm80").split(","))
SECONDS = float(os.environ.get("DEEPEP_GPU_SECONDS") or 600)
CAPABILITY = {"sm90": (9, 0), "sm80": (8, 0)}
LAST_WORDS_SECONDS = 10.0
"""Between the time when ranks should end by themselves and the one when they are stopped."""


def missing(arch: str) -> str:
    """Why nothing of this architecture can run here; empty if it can."""
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    capability = torch.cuda.get_device_capability(0)
    if capability < CAPABILITY[arch]:
        return f"a GPU of compute capability {capability[0]}.{capability[1]} cannot run {arch}"
    if arch not in {entry.arch for entry in registry.variants()}:
        return f"no {arch} kernel is built; build with --kernels=gpu"
    return ""


@dataclass(frozen=True)
class Job:
    """One test on one number of ranks."""

    module: str
    function: str
    count: int
    arch: str
    choice: str

    def __str__(self) -> str:
        return f"{self.function}[{self.arch}-{self.count}" + (
            f"-{self.choice}]" if self.choice else "]"
        )


@dataclass
class Rank:
    """What the body of a test gets."""

    group: Any
    arch: Any
    index: int
    size: int
    shared: dict[str, Buffer] = field(default_factory=dict, repr=False)

    def new_buffer(self, timeout: float = 20, **options: Any) -> Buffer:
        """A Buffer of the test's own, to be closed by it. Collective."""
        return Buffer(self.group, device="cuda", arch=self.arch, timeout=timeout, **options)

    def buffer(self) -> Buffer:
        """One that all tests use, until one of them fails. Collective at first use."""
        if self.arch not in self.shared:
            self.shared[self.arch] = self.new_buffer()
        return self.shared[self.arch]

    def barrier(self) -> None:
        torch.distributed.barrier(group=self.group)


Body = Callable[..., None]


def on_ranks(
    counts: Sequence[int] = COUNTS, choices: Sequence[str] = ("",), archs: Sequence[str] = ARCHS
) -> Callable[[Body], Any]:
    """Makes a pytest test of a function of a rank, and of a choice where there are some."""

    def decorate(body: Body) -> Any:
        # Architectures vary fastest: what a case expects is then found once for all of them.
        cases = [
            pytest.param(
                Job(body.__module__, body.__name__, count, arch, choice),
                id=f"{arch}-{count}" + (f"-{choice}" if choice else ""),
                marks=pytest.mark.skipif(bool(missing(arch)), reason=missing(arch) or "-"),
            )
            for count in counts
            if count <= MAX_RANKS
            for choice in choices
            for arch in archs
        ]

        @pytest.mark.parametrize("job", cases)
        def test(job: Job, request: pytest.FixtureRequest) -> None:
            went = run_all(_selected(request.session.items))[job]
            request.node.user_properties.append(("seconds", went.seconds))
            if went.skipped:
                pytest.skip(went.skipped)
            if went.trouble:
                pytest.fail(went.trouble, pytrace=False)

        test.__doc__ = body.__doc__
        test.__name__ = body.__name__
        test.__module__ = body.__module__
        test.body = body  # type: ignore[attr-defined]
        return test

    return decorate


def _selected(items: Sequence[Any]) -> tuple[Job, ...]:
    """What is to run in this session, fewer ranks first."""
    calls = [item.callspec.params for item in items if hasattr(item, "callspec")]
    # Where no number of ranks is left, pytest gives a test something else in a job's place.
    jobs = [p["job"] for p in calls if isinstance(p.get("job"), Job)]
    return tuple(sorted(jobs, key=lambda job: job.count))


class Went(NamedTuple):
    """What became of a job: what went wrong, empty if nothing; how long it took; why all ranks left
    it out, empty if they did not."""

    trouble: str
    seconds: float = 0.0
    skipped: str = ""


@cache
def run_all(jobs: tuple[Job, ...], seconds: float = SECONDS) -> dict[Job, Went]:
    """Runs the jobs. After one that ended its processes, the rest goes on in new ones."""
    deadline = time.monotonic() + seconds
    results: dict[Job, Went] = {}
    left = jobs
    while left and time.monotonic() < deadline:
        results |= _run_some(left, deadline)
        left = tuple(job for job in left if job not in results)
    return results | dict.fromkeys(left, Went(f"was not begun within {seconds:g} s"))


def _run_some(jobs: tuple[Job, ...], deadline: float) -> dict[Job, Went]:
    """Runs jobs in one set of processes, as far as these come: at least one, or all have failed."""
    from tests.gpu import serving

    count = max(job.count for job in jobs)
    with tempfile.TemporaryDirectory(prefix="deepep_gpu_") as folder:
        outcomes = process_outcomes(
            count,
            serving.serve,
            jobs,
            folder,
            deadline,
            timeout=deadline - time.monotonic() + LAST_WORDS_SECONDS,
        )
        told = [serving.read(Path(folder), rank) for rank in range(count)]
    ends = "; ".join(outcome.describe() for outcome in outcomes)
    done: dict[Job, Went] = {}
    for number, job in enumerate(jobs):
        team = told[: job.count]
        if not any(number in rank.began for rank in team):
            # If nothing began at all, a second try would end the same way.
            return done or dict.fromkeys(jobs, Went(f"did not begin ({ends})"))
        lines, took = [], 0.0
        for index, rank in enumerate(team):
            if number in rank.finished:
                went = rank.finished[number]
                lines += [f"rank {index}: {went.trouble}"] if went.trouble else []
                took = max(took, went.seconds)
            else:
                state = "did not finish" if number in rank.began else "did not begin"
                lines.append(f"rank {index} {state} ({ends}){rank.stacks}")
        reasons = [rank.finished[number].trouble for rank in team if number in rank.finished]
        if len(reasons) == job.count and all(map(serving.is_skip, reasons)):
            done[job] = Went("", took, reasons[0])
        else:
            done[job] = Went("\n".join(lines), took)
    return done
