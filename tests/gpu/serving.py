"""What a rank's process does for ranks.py: one job after the other, each outcome written to a file.

A file, so that what was done is known even when the process dies.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import pytest
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from tests.gpu.ranks import Job, Rank, Went

PATIENCE = timedelta(seconds=30)
"""How long a rank waits in the group for one that failed before it came there."""
JOB_SECONDS = float(os.environ.get("DEEPEP_GPU_JOB_SECONDS") or 60)
"""A process that is at one job for longer writes its stacks and ends."""
SKIPPED = "skipped: "
"""Begins what is told of a job that a rank could not do."""


@dataclass
class Told:
    """What one rank wrote down: the numbers of the jobs that it began, how those went that it
    finished, and its stacks if one took too long."""

    began: set[int] = field(default_factory=set)
    finished: dict[int, Went] = field(default_factory=dict)
    stacks: str = ""


def _tell(file: TextIO, **facts: Any) -> None:
    file.write(json.dumps(facts) + "\n")
    file.flush()


def read(folder: Path, rank: int) -> Told:
    from tests.gpu.ranks import Went

    told = Told()
    path, stacks = folder / f"{rank}.jsonl", folder / f"{rank}.stacks"
    for line in path.read_text().splitlines() if path.exists() else []:
        fact = json.loads(line)
        if "began" in fact:
            told.began.add(fact["began"])
        else:
            told.finished[fact["number"]] = Went(fact["trouble"], fact["seconds"])
    if stacks.exists() and (text := stacks.read_text()):
        told.stacks = f"\nIts stacks when it died, or after {JOB_SECONDS:g} s:\n{text}"
    return told


@contextlib.contextmanager
def _limited(stacks: TextIO) -> Iterator[None]:
    """Ends the process when what is inside takes too long, whatever it waits for."""
    faulthandler.enable(file=stacks)  # of a process that dies of a signal
    faulthandler.dump_traceback_later(JOB_SECONDS, exit=True, file=stacks)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        faulthandler.disable()


def _run(job: Job, rank: Rank) -> str:
    """Does one job; returns what went wrong."""
    try:
        body = getattr(importlib.import_module(job.module), job.function).body
        body(rank, *([job.choice] if job.choice else []))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except pytest.skip.Exception as reason:
        return f"{SKIPPED}{reason}"
    except BaseException as error:  # also what pytest raises to fail
        trace = "".join(traceback.format_exception(error, limit=-4))
        return f"{type(error).__name__}: {error}\n{trace}"
    return ""


def is_skip(trouble: str) -> bool:
    return trouble.startswith(SKIPPED)


def _report(number: int, total: int, job: Job, seconds: float, troubles: Sequence[str]) -> None:
    """For who watches, and for who has only a part because the run was cut."""
    bad = [f"rank {rank}: {text}" for rank, text in enumerate(troubles) if text]
    word = "ok" if not bad else "skipped" if all(map(is_skip, troubles)) else "FAILED"
    print(f"{number + 1}/{total} {word} {seconds:.2f} s {job}", *bad, sep="\n", file=sys.stderr)
    if path := os.environ.get("DEEPEP_GPU_PROGRESS"):
        with Path(path).open("a") as file:
            _tell(file, test=str(job), seconds=round(seconds, 3), trouble="\n".join(bad))


def serve(group: Any, jobs: Sequence[Job], folder: str, deadline: float) -> None:
    """Does all jobs in step with the other ranks; begins none after `deadline` (time.monotonic)."""
    os.environ["DEEPEP_TEST_DEVICE"] = "cuda"  # before tests.distributed.cases is imported
    from tests.gpu.ranks import Rank

    me = group.rank()
    if torch.cuda.is_available():
        torch.cuda.set_device(me % torch.cuda.device_count())
    shared: dict[str, Any] = {}
    team, count = None, 0
    with (
        Path(folder, f"{me}.jsonl").open("w") as file,
        Path(folder, f"{me}.stacks").open("w") as stacks,
    ):
        for number, job in enumerate(jobs):
            if team is None or job.count != count:
                # A group of the job's own: when one fails, ranks may be at different places in it.
                shared.clear()
                count = job.count
                team = dist.new_group(list(range(count)), timeout=PATIENCE)
            start = time.monotonic()
            trouble = ""
            if me < count:
                _tell(file, began=number)
                with _limited(stacks):
                    trouble = _run(job, Rank(team, job.arch, me, count, shared))
                _tell(file, number=number, trouble=trouble, seconds=time.monotonic() - start)
            states: list[Any] = [None] * group.size()
            is_late = time.monotonic() > deadline
            dist.all_gather_object(states, (trouble, is_late), group=group)
            if me == 0:
                troubles = [state[0] for state in states[:count]]
                _report(number, len(jobs), job, time.monotonic() - start, troubles)
            if any(state[0] for state in states):
                shared.clear()
                team = None
            if any(state[1] for state in states):
                break
    for buffer in shared.values():
        buffer.destroy()
