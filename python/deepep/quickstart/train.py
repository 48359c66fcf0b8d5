"""What each rank's process does: a comparison, the training steps, and a comparison again."""

from __future__ import annotations

import sys
import threading
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

from deepep.quickstart.check import check
from deepep.quickstart.clock import Clock, ClockedBuffer
from deepep.quickstart.rank import Rank
from deepep.quickstart.results import Result
from deepep.quickstart.settings import Settings


def work(group: Any, settings: Settings) -> Result:
    """Body of one rank; `group` is a torch process group."""
    clock, result = Clock(), Result()
    buffer = ClockedBuffer(clock, group, hidden=settings.hidden, timeout=settings.timeout)
    with buffer:
        rank = Rank(group, settings, buffer, clock)
        result.before = check(rank, step=settings.steps)
        _train(rank, result)
        result.after = check(rank, step=settings.steps + 1)
        result.variants = buffer.chosen_variants()
    return result


def _train(rank: Rank, result: Result) -> None:
    steps, clock = rank.settings.steps, rank.clock
    # One rank speaks for all. Where stderr is no terminal, a few lines replace the bar.
    disable = None if rank.rank == 0 else True
    # The bar's own lock is one between processes, which a rank that is stopped leaves behind.
    tqdm.set_lock(threading.RLock())
    with tqdm(
        total=steps, desc="training", unit="step", disable=disable, dynamic_ncols=True
    ) as bar:
        for step in range(steps):
            loss = rank.train(step).loss
            result.losses.append(loss)
            if step == 0:
                clock.seconds.clear()  # it warms up caches and memory
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            bar.update()
            if rank.rank == 0 and not sys.stderr.isatty() and (step + 1) % max(1, steps // 6) == 0:
                print(f"  step {step + 1:>4} of {steps}  loss {loss:.3f}", flush=True)
    result.seconds = {phase: total / (steps - 1) for phase, total in clock.seconds.items()}
    result.rows_sent = rank.buffer.rows_sent
    result.expert_load = rank.buffer.expert_load
