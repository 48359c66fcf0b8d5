"""What a rank's process does for ranks.py: one job after the other, each outcome written to a file.

A file, so that what was done is known even when the process dies.
"""

from __future__ import annotations

import importlib
import json
import os
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from tests.gpu.ranks import Job, Rank

PATIENCE = timedelta(seconds=30)
"""How long a rank waits in the group for one that failed before it came there."""


def _tell(file: TextIO, **facts: Any) -> None:
    file.write(json.dumps(facts) + "\n")
    file.flush()


def read(folder: Path, rank: int) -> tuple[set[int], dict[int, str]]:
    """Numbers of the jobs that this rank began, and what went wrong in those that it finished."""
    path = folder / f"{rank}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    facts = [json.loads(line) for line in lines]
    began = {item["began"] for item in facts if "began" in item}
    return began, {item["number"]: item["trouble"] for item in facts if "number" in item}


def _run(job: Job, rank: Rank) -> str:
    """Does one job; returns what went wrong."""
    try:
        body = getattr(importlib.import_module(job.module), job.function).body
        body(rank, *([job.choice] if job.choice else []))
        torch.cuda.synchronize()
    except BaseException as error:  # also what pytest raises to fail
        trace = "".join(traceback.format_exception(error, limit=-4))
        return f"{type(error).__name__}: {error}\n{trace}"
    return ""


def serve(group: Any, jobs: Sequence[Job], folder: str) -> None:
    """Does all jobs in step with the other ranks."""
    os.environ["DEEPEP_TEST_DEVICE"] = "cuda"  # before tests.distributed.cases is imported
    from tests.gpu.ranks import Rank

    torch.cuda.set_device(group.rank() % torch.cuda.device_count())
    # The jobs have a group of their own: when one fails, ranks may be at different places in it.
    own = dist.new_group(timeout=PATIENCE)
    shared: dict[str, Any] = {}
    with Path(folder, f"{group.rank()}.jsonl").open("w") as file:
        for number, job in enumerate(jobs):
            _tell(file, began=number)
            rank = Rank(own, job.arch, group.rank(), group.size(), shared)
            trouble = _run(job, rank)
            _tell(file, number=number, trouble=trouble)
            troubles: list[str] = [""] * group.size()
            dist.all_gather_object(troubles, trouble, group=group)
            if any(troubles):
                shared.clear()
                own = dist.new_group(timeout=PATIENCE)
    for buffer in shared.values():
        buffer.destroy()
