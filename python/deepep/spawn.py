"""Ranks as real processes, with a gloo group for their first contact. Used through deepep.testing.

Processes are spawned, not forked: a fork would copy threads and locks of torch. So `fn` must be a
function of an importable module, and arguments and results must be picklable.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

GRACE_SECONDS = 3.0
"""How long the others may go on after one rank failed, so that their errors are told too."""


@dataclass(slots=True)
class Outcome:
    """How one rank ended.

    Attributes:
        rank: its number.
        value: what fn returned; None if it did not return.
        error: what fn raised; None if it returned or died.
        exitcode: exit status; negative: the number of the signal that killed it; None: it was still
            running when time was up.
        killed: whether it was killed by the caller of the ranks, because of timeout or a failure.
    """

    rank: int
    value: Any = None
    error: BaseException | None = None
    exitcode: int | None = None
    killed: bool = False
    finished: bool = field(default=False, repr=False)

    @property
    def ok(self) -> bool:
        """Whether fn returned and the process then ended well."""
        return self.finished and self.error is None and self.exitcode == 0

    def describe(self) -> str:
        """One line in words."""
        if self.ok:
            return f"rank {self.rank} finished"
        if self.error is not None:
            return f"rank {self.rank} raised {type(self.error).__name__}: {self.error}"
        when = "after fn returned" if self.finished else "before fn returned"
        if self.killed:
            return f"rank {self.rank} was still running and was stopped {when}"
        code = self.exitcode
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            return f"rank {self.rank} was killed by {name} {when} (exit code {code})"
        return f"rank {self.rank} ended with exit code {code} {when}"


def _picklable(error: BaseException) -> BaseException:
    """The error itself, or one with the same words if it cannot travel between processes."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _end_with_parent() -> None:
    """Kills this process when the one that started it has died: a rank that waits for a peer, on
    the host or on a device, would do so for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _child(
    rank: int, size: int, store_file: str, timeout: float, fn: Any, args: Any, pipe: Connection
) -> None:
    """Body of one rank's process."""
    _end_with_parent()
    import torch
    import torch.distributed

    dist: Any = torch.distributed
    if sys.platform == "linux" and os.path.isdir("/sys/class/net/lo"):
        # All ranks are on this machine; its host name need not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    error: BaseException | None = None
    value = None
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store_file, size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
        )
        dist.barrier()  # or one that is soon done would be gone before another has connected
        value = fn(dist.group.WORLD, *args)
        message = pickle.dumps((value, None))
    except BaseException as raised:
        error = _picklable(raised)
        error.add_note(f"raised on rank {rank} of {size}\n{traceback.format_exc()}")
        message = pickle.dumps((None, error))
    pipe.send_bytes(message)
    pipe.close()
    if error is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        # Destructors of a group with dead peers may wait, and the error has been sent.
        os._exit(1)
    dist.destroy_process_group()


def _receive(outcome: Outcome, pipe: Connection) -> None:
    """Takes a rank's result, if it sent one before it ended."""
    try:
        if pipe.poll():
            outcome.value, outcome.error = pickle.loads(pipe.recv_bytes())
            outcome.finished = True
    except EOFError:
        return


def _collect(
    processes: Sequence[Any], pipes: Sequence[Connection], deadline: float, stop_on_failure: bool
) -> list[Outcome]:
    """Waits for all ranks, at most until `deadline`, and stops the rest."""
    outcomes = [Outcome(rank) for rank in range(len(processes))]
    running = set(range(len(processes)))
    while running and (left := deadline - time.monotonic()) > 0:
        ready = wait(
            [*(pipes[r] for r in running), *(processes[r].sentinel for r in running)], left
        )
        for rank in sorted(running):
            outcome, process = outcomes[rank], processes[rank]
            if pipes[rank] not in ready and process.sentinel not in ready:
                continue
            # A result is read as soon as it is there: a large one would block its sender.
            _receive(outcome, pipes[rank])
            process.join(max(0.0, min(GRACE_SECONDS, deadline - time.monotonic())))
            if process.is_alive():
                continue
            outcome.exitcode = process.exitcode
            running.discard(rank)
            if stop_on_failure and not outcome.ok:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    for rank in running:
        outcomes[rank].killed = True
        processes[rank].kill()
        processes[rank].join()
    return outcomes


def _run(
    n: int, fn: Callable[..., Any], args: Sequence[Any], timeout: float, stop_on_failure: bool
) -> list[Outcome]:
    if n < 1:
        raise ValueError(f"n={n}: there must be at least 1 rank.")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="deepep_ranks_") as folder:
        store = str(Path(folder) / "store")
        processes, pipes = [], []
        deadline = time.monotonic() + timeout
        try:
            for rank in range(n):
                reader, writer = context.Pipe(duplex=False)
                process = context.Process(
                    target=_child,
                    args=(rank, n, store, timeout, fn, tuple(args), writer),
                    name=f"rank-{rank}",
                    daemon=True,
                )
                process.start()
                writer.close()
                processes.append(process)
                pipes.append(reader)
            return _collect(processes, pipes, deadline, stop_on_failure)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.join()
            for pipe in pipes:
                pipe.close()


def process_outcomes(
    n: int, fn: Callable[..., Any], *args: Any, timeout: float = 120.0
) -> list[Outcome]:
    """Runs fn(group, *args) on `n` processes and reports how each one ended, whatever happened.

    A rank that dies does not stop the others, so that a test can look at what they did. Ranks still
    running after `timeout` seconds are killed.
    """
    return _run(n, fn, args, timeout, stop_on_failure=False)


def run_processes(n: int, fn: Callable[..., T], *args: Any, timeout: float = 120.0) -> list[T]:
    """Runs fn(group, *args) on `n` processes, each with a torch gloo process group of all of them.

    Args:
        n: processes, at least 1.
        fn: a function at the top level of an importable module.
        args: picklable.
        timeout: seconds for all ranks to finish, starting processes included.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RuntimeError: a rank died or did not finish; the text says how every rank ended, with exit
            codes. The first error of a rank, if there is one, is its cause.
        Exception: what fn raised, when all failed ranks but one were only stopped because of it.
    """
    outcomes = _run(n, fn, args, timeout, stop_on_failure=True)
    if all(outcome.ok for outcome in outcomes):
        return [outcome.value for outcome in outcomes]
    raised = [outcome for outcome in outcomes if outcome.error is not None]
    died = [o for o in outcomes if not o.ok and o.error is None and not o.killed]
    if len(raised) == 1 and not died and raised[0].error is not None:
        raise raised[0].error
    failed = "; ".join(outcome.describe() for outcome in outcomes if not outcome.ok)
    if not raised and not died:
        raise TimeoutError(f"{failed} after {timeout:g} s (raise timeout= if they are only slow).")
    raise RuntimeError(f"{n} ranks: {failed}") from (raised[0].error if raised else None)
