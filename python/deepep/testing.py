"""Runs one function on many ranks of this machine: as threads, or as real processes.

    def work(group, tokens):
        with deepep.Buffer(group) as buffer:
            ...

    results = run_ranks(12, work, 100)       # threads: starts in milliseconds
    results = run_processes(4, work, 100)    # processes with a gloo group

`fn(group, *args)` is called once for each rank; `group.rank()` and `group.size()` work for both.
Threads get a ThreadGroup, processes a torch process group; Buffer accepts either. Nothing here
waits for ever: each function has a timeout in seconds.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from deepep.spawn import Outcome, process_outcomes, run_processes

__all__ = [
    "GroupAbortedError",
    "Outcome",
    "ThreadGroup",
    "process_outcomes",
    "run_processes",
    "run_ranks",
]

T = TypeVar("T")


class GroupAbortedError(RuntimeError):
    """A collective call of a ThreadGroup cannot finish, because another rank raised or is late."""


class _World:
    """What the ranks of one ThreadGroup share."""

    def __init__(self, size: int, timeout: float) -> None:
        self.barrier = threading.Barrier(size, timeout=timeout)
        # Two rows, used in turn: a rank writes row g + 2 only after everybody entered call g + 1,
        # so nobody still reads row g.
        self.slots: list[list[bytes]] = [[b""] * size for _ in range(2)]


class ThreadGroup:
    """A Communicator between the threads of one run_ranks call; each rank has its own object."""

    def __init__(self, world: _World, rank: int, size: int) -> None:
        self._world = world
        self._rank = rank
        self._size = size
        self._calls = 0

    def rank(self) -> int:
        """Number of this rank."""
        return self._rank

    def size(self) -> int:
        """Number of ranks."""
        return self._size

    def all_gather(self, data: bytes) -> list[bytes]:
        """Every rank's `data` in rank order. Raises GroupAbortedError when a rank has failed."""
        slots = self._world.slots[self._calls % 2]
        self._calls += 1
        slots[self._rank] = bytes(data)
        try:
            self._world.barrier.wait()
        except threading.BrokenBarrierError:
            raise GroupAbortedError(
                f"Rank {self._rank} waited for the other ranks, but one of them raised an error or "
                "did not come in time. Its own error says why."
            ) from None
        return list(slots)

    def barrier(self) -> None:
        """Waits for all ranks."""
        self.all_gather(b"")


def _stack_of(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or -1)
    return "".join(traceback.format_stack(frame, limit=None)[-4:]) if frame else "(no stack)"


def _raise_errors(errors: dict[int, Exception], size: int) -> None:
    """Raises what the ranks raised: one error as it is, several as a group."""
    for rank, error in errors.items():
        error.add_note(f"raised on rank {rank} of {size}")
    # Who was only waiting for a failed rank has nothing to add.
    causes = [error for error in errors.values() if not isinstance(error, GroupAbortedError)]
    causes = causes or list(errors.values())
    if len(causes) == 1:
        raise causes[0]
    ranks = ", ".join(map(str, sorted(errors)))
    raise ExceptionGroup(f"ranks {ranks} of {size} failed", causes)


def run_ranks(n: int, fn: Callable[..., T], *args: Any, timeout: float = 120.0) -> list[T]:
    """Runs fn(group, *args) on `n` ranks, each a thread of this process.

    When a rank raises, ranks that wait in the group's collective calls are released; ranks inside
    an operation of a Buffer end by that Buffer's own timeout.

    Args:
        n: ranks, at least 1.
        fn: called with a ThreadGroup and `args`; `args` are shared between the threads.
        timeout: seconds for all ranks to finish.

    Returns:
        What each rank returned, in rank order.

    Raises:
        TimeoutError: ranks are still running; the text has their stacks. Their threads go on.
        ExceptionGroup: several ranks raised. A single error is raised as it is. Notes name ranks.
    """
    if n < 1:
        raise ValueError(f"n={n}: there must be at least 1 rank.")
    world = _World(n, timeout)
    results: dict[int, T] = {}
    errors: dict[int, Exception] = {}

    def body(rank: int) -> None:
        try:
            results[rank] = fn(ThreadGroup(world, rank, n), *args)
        except Exception as error:
            errors[rank] = error
            world.barrier.abort()
        except BaseException as error:  # SystemExit, and what test runners raise to skip or fail
            errors[rank] = RuntimeError(f"{type(error).__name__}: {error}")
            errors[rank].__cause__ = error
            world.barrier.abort()

    threads = [
        threading.Thread(target=body, args=(rank,), name=f"rank-{rank}", daemon=True)
        for rank in range(n)
    ]
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    running = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if running:
        world.barrier.abort()
        stacks = "\n".join(f"rank {rank}:\n{_stack_of(threads[rank])}" for rank in running)
        raised = "".join(f"\nrank {rank} raised {error!r}" for rank, error in errors.items())
        raise TimeoutError(
            f"Ranks {running} of {n} did not finish within {timeout:g} s (raise timeout= if they "
            f"are only slow). They are at:\n{stacks}{raised}"
        )
    if errors:
        _raise_errors(errors, n)
    return [results[rank] for rank in range(n)]
