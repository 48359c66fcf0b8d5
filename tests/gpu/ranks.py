"""Tests whose body runs on every rank, each a process on a GPU.

    @on_ranks(counts=(2, 8), choices=("a", "b"))
    def test_something(rank: Rank, choice: str) -> None:
        checks.round_trip(rank.buffer(), ...)

is a pytest test for each number of ranks, architecture and choice. Starting processes takes
seconds, so those of one number of ranks run all the selected tests in turn, and pytest only looks
up how each of them went.

    DEEPEP_GPU_RANKS   the largest number of ranks, default 8
    DEEPEP_GPU_ARCHS   architectures, default sm90,sm80
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from deepep import Buffer, registry
from deepep.testing import process_outcomes

COUNTS = (1, 2, 3, 4, 8)
MAX_RANKS = int(os.environ.get("DEEPEP_GPU_RANKS") or 8)
ARCHS = tuple((os.environ.get("DEEPEP_GPU_ARCHS") or "sm90,sm80").split(","))
CAPABILITY = {"sm90": (9, 0), "sm80": (8, 0)}


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
    arch: str
    choice: str

    def __str__(self) -> str:
        return f"{self.function}[{self.arch}-{self.choice}]"


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
        cases = [
            pytest.param(
                count,
                Job(body.__module__, body.__name__, arch, choice),
                id=f"{arch}-{count}" + (f"-{choice}" if choice else ""),
                marks=pytest.mark.skipif(bool(missing(arch)), reason=missing(arch) or "-"),
            )
            for count in counts
            if count <= MAX_RANKS
            for arch in archs
            for choice in choices
        ]

        @pytest.mark.parametrize("count, job", cases)
        def test(count: int, job: Job, request: pytest.FixtureRequest) -> None:
            if trouble := _went(count, _selected(count, request.session.items))[job]:
                pytest.fail(trouble, pytrace=False)

        test.__doc__ = body.__doc__
        test.__name__ = body.__name__
        test.__module__ = body.__module__
        test.body = body  # type: ignore[attr-defined]
        return test

    return decorate


def _selected(count: int, items: Sequence[Any]) -> tuple[Job, ...]:
    """What is to run on this number of ranks in this session."""
    calls = [item.callspec.params for item in items if hasattr(item, "callspec")]
    return tuple(p["job"] for p in calls if p.get("count") == count and "job" in p)


@cache
def _went(count: int, jobs: tuple[Job, ...]) -> dict[Job, str]:
    """Runs the jobs on so many processes; what went wrong in each, empty if nothing."""
    from tests.gpu import serving

    with tempfile.TemporaryDirectory(prefix="deepep_gpu_") as folder:
        limit = min(300.0, 60.0 + 2.0 * len(jobs))
        outcomes = process_outcomes(count, serving.serve, jobs, folder, timeout=limit)
        told = [serving.read(Path(folder), rank) for rank in range(count)]
    ends = "; ".join(outcome.describe() for outcome in outcomes)
    result = {}
    for number, job in enumerate(jobs):
        lines = []
        for rank, (started, finished) in enumerate(told):
            if number in finished:
                lines += [f"rank {rank}: {finished[number]}"] if finished[number] else []
            else:
                state = "did not finish" if number in started else "did not begin"
                lines.append(f"rank {rank} {state} ({ends})")
        result[job] = "\n".join(lines)
    return result
