"""run_ranks and run_processes: results, errors, deaths and timeouts, never a hang."""

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from deepep.errors import CommTimeoutError
from deepep.testing import (
    GroupAbortedError,
    ThreadGroup,
    process_outcomes,
    run_processes,
    run_ranks,
)


def test_threads_return_results_in_rank_order() -> None:
    assert run_ranks(3, lambda group, x: (group.rank(), group.size(), x), "arg") == [
        (rank, 3, "arg") for rank in range(3)
    ]


def test_many_threads_gather_many_times_without_mixing_calls() -> None:
    def work(group: ThreadGroup) -> None:
        for call in range(200):
            gathered = group.all_gather(bytes([group.rank(), call]))
            assert gathered == [bytes([rank, call]) for rank in range(12)]

    run_ranks(12, work)


def test_one_failing_rank_releases_the_others_and_is_raised() -> None:
    def work(group: ThreadGroup) -> None:
        if group.rank() == 2:
            raise KeyError("lost")
        group.barrier()

    start = time.monotonic()
    with pytest.raises(KeyError, match="lost") as caught:
        run_ranks(4, work)
    assert caught.value.__notes__ == ["raised on rank 2 of 4"]
    assert time.monotonic() - start < 10


def test_several_failing_ranks_are_raised_as_a_group() -> None:
    def work(group: ThreadGroup) -> None:
        if group.rank() != 1:
            raise ValueError(f"bad {group.rank()}")

    with pytest.raises(ExceptionGroup, match="ranks 0, 2 of 3") as caught:
        run_ranks(3, work)
    assert {str(error) for error in caught.value.exceptions} == {"bad 0", "bad 2"}


def test_a_rank_that_skips_a_collective_is_reported_by_the_waiting_ones() -> None:
    def work(group: ThreadGroup) -> None:
        if group.rank() == 0:
            group.barrier()

    with pytest.raises((GroupAbortedError, TimeoutError)):
        run_ranks(2, work, timeout=0.5)


def test_stuck_threads_are_reported_with_their_stacks() -> None:
    release = threading.Event()

    def wait_for_ever(group: ThreadGroup) -> None:
        if group.rank() == 1:
            release.wait(60)

    with pytest.raises(TimeoutError) as caught:
        run_ranks(2, wait_for_ever, timeout=0.5)
    release.set()
    text = str(caught.value)
    assert "Ranks [1] of 2" in text
    assert "wait_for_ever" in text


def test_exits_of_threads_are_errors_and_no_ranks_are_refused() -> None:
    def leave(group: ThreadGroup) -> None:
        raise SystemExit(3)

    with pytest.raises(RuntimeError, match="SystemExit"):
        run_ranks(1, leave)
    with pytest.raises(ValueError, match="n=0"):
        run_ranks(0, leave)
    with pytest.raises(ValueError, match="n=0"):
        run_processes(0, leave)


def rank_and_argument(group: Any, argument: bytes) -> tuple[int, int, bytes]:
    return group.rank(), group.size(), argument


def test_processes_return_large_results_in_rank_order() -> None:
    # Larger than a pipe: the parent must read before the child ends.
    payload = b"x" * 1_000_000
    assert run_processes(2, rank_and_argument, payload) == [(0, 2, payload), (1, 2, payload)]


def raise_on_one(group: Any) -> None:
    if group.rank() == 1:
        raise CommTimeoutError("peer is late", operation="dispatch", missing_ranks=[0])
    time.sleep(60)


def test_error_of_a_process_is_raised_with_attributes_and_the_rest_is_stopped() -> None:
    start = time.monotonic()
    with pytest.raises(CommTimeoutError, match="peer is late") as caught:
        run_processes(2, raise_on_one)
    assert caught.value.missing_ranks == (0,)
    assert any("raised on rank 1 of 2" in note for note in caught.value.__notes__)
    assert time.monotonic() - start < 40


def die_on_one(group: Any) -> str:
    if group.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def test_dead_processes_are_reported_with_their_exit_code() -> None:
    with pytest.raises(RuntimeError, match=r"rank 1 was killed by SIGKILL.*exit code -9"):
        run_processes(2, die_on_one)


def test_outcomes_show_survivors_beside_the_dead() -> None:
    survivor, dead = process_outcomes(2, die_on_one)
    assert survivor.ok and survivor.value == "alive" and survivor.exitcode == 0
    assert not dead.ok and dead.exitcode == -signal.SIGKILL and not dead.killed


class UnpicklableError(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__("two arguments")


def raise_unpicklable(group: Any) -> None:
    raise UnpicklableError(1, 2)


def leave_early(group: Any) -> None:
    os._exit(5)


def sleep_long(group: Any) -> None:
    time.sleep(60)


def test_odd_endings_of_processes_are_told_apart() -> None:
    (outcome,) = process_outcomes(1, raise_unpicklable)
    assert isinstance(outcome.error, RuntimeError)
    assert "UnpicklableError: two arguments" in str(outcome.error)
    (outcome,) = process_outcomes(1, leave_early)
    assert outcome.describe() == "rank 0 ended with exit code 5 before fn returned"
    (outcome,) = process_outcomes(1, sleep_long, timeout=2)
    assert outcome.killed
    assert "was stopped" in outcome.describe()


def test_processes_that_take_too_long_raise_a_timeout() -> None:
    with pytest.raises(TimeoutError, match="still running"):
        run_processes(1, sleep_long, timeout=2)


def _tell_and_spin(group: Any, folder: str) -> None:
    (Path(folder) / str(group.rank())).write_text(str(os.getpid()))
    while True:  # as a rank that waits for a peer
        time.sleep(0.01)


def _start_spinning(folder: str) -> None:
    process_outcomes(2, _tell_and_spin, folder)


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"  # nobody may be there to collect a dead orphan


def test_ranks_die_with_the_process_that_started_them(tmp_path: Path) -> None:
    """However it dies: it cannot stop them when it is killed."""
    parent = multiprocessing.get_context("spawn").Process(
        target=_start_spinning, args=(str(tmp_path),)
    )
    parent.start()
    told = [tmp_path / "0", tmp_path / "1"]
    deadline = time.monotonic() + 60
    while not all(path.exists() and path.read_text() for path in told):
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.05)
    ranks = [int(path.read_text()) for path in told]
    parent.kill()
    parent.join()
    deadline = time.monotonic() + 10
    while any(map(_is_running, ranks)):
        assert time.monotonic() < deadline, "the ranks outlive their parent"
        time.sleep(0.05)
