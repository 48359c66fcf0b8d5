"""Ranks as real processes: the same results, late and killed ranks, nothing left behind."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepep import Buffer, CommTimeoutError
from deepep.testing import Outcome, process_outcomes, run_processes

from tests.distributed import checks
from tests.distributed.cases import FAULT_CASE, cases_of, find
from tests.distributed.checks import expect

LATE = 2  # the rank that is late, or killed
THREE = replace(FAULT_CASE, tokens=FAULT_CASE.tokens[:3])


def shared_files() -> set[str]:
    """Names in /dev/shm, without the semaphores of Python programs that run at the same time."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


@pytest.fixture(autouse=True)
def nothing_is_left_in_shared_memory() -> Iterator[None]:
    before = shared_files()
    yield
    deadline = time.monotonic() + 5  # other programs come and go there
    while (left := shared_files() - before) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left


def memory_files() -> list[str]:
    """Open files and mappings of exported memory in this process."""
    links = [os.readlink(link.path) for link in os.scandir("/proc/self/fd") if link.is_symlink()]
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [text for text in [*links, *maps] if "memfd:deepep" in text]


def round_trips(group: Any, names: list[str]) -> None:
    """Every case twice, then all handles again; afterwards this process holds no memory of it."""

    def work() -> None:
        chosen = [expect(find(name, group.size())) for name in names]
        with Buffer(group, timeout=60) as buffer:
            handles = [checks.round_trip(buffer, expected) for expected in chosen * 2]
            for expected, handle in zip(chosen * 2, handles, strict=True):
                checks.combine(buffer, expected, handle)
            assert memory_files()

    work()
    assert memory_files() == []


def test_two_processes_pass_every_case() -> None:
    run_processes(2, round_trips, [case.name for case in cases_of(2)])


def late(group: Any, names: list[str]) -> float:
    """All cases, then a combine that rank 2 comes to after 5 s: how long it took."""
    round_trips(group, names)
    expected = expect(find("holes", group.size()))
    with Buffer(group, timeout=40) as buffer:
        handle = checks.round_trip(buffer, expected)
        group.barrier().wait()
        start = time.monotonic()
        if group.rank() == LATE:
            time.sleep(5)
        checks.combine(buffer, expected, handle)
        return time.monotonic() - start


def test_four_processes_of_which_one_is_5_seconds_late() -> None:
    """D25: a late rank is waited for."""
    names = ["odd_counts", "idle_ranks", "top32", "fp8_column_scales", "fp8_packed_scales"]
    names += ["fixed_size", "fixed_size_fp8", "all_to_one_rank"]
    assert all(4.5 < seconds < 20 for seconds in run_processes(4, late, names))


def test_eight_processes() -> None:
    run_processes(8, round_trips, ["holes", "odd_counts", "fp8_packed_scales"])


class MpiLike:
    """What a Buffer uses of an mpi4py communicator, over a torch group."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def Get_rank(self) -> int:  # noqa: N802
        return int(self._group.rank())

    def Get_size(self) -> int:  # noqa: N802
        return int(self._group.size())

    def allgather(self, item: object) -> list[Any]:
        gathered: list[Any] = [None] * self.Get_size()
        torch.distributed.all_gather_object(gathered, item, group=self._group)
        return gathered


def with_mpi(group: Any) -> None:
    expected = expect(find("odd_counts", 2))
    for buffer in (Buffer(MpiLike(group), timeout=60), Buffer(comm=MpiLike(group), timeout=60)):
        with buffer:
            checks.round_trip(buffer, expected)
            buffer.reset()
            checks.round_trip(buffer, expected)


def test_an_mpi_communicator_serves_as_group() -> None:
    run_processes(2, with_mpi)


def until_killed(group: Any, delay: float) -> dict[str, Any]:
    """Rounds until rank 2 is killed at a moment of its own; what the others were told."""
    expected = expect(THREE)
    with Buffer(group, timeout=2) as buffer:
        checks.round_trip(buffer, expected)  # all have connected
        if group.rank() == LATE:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        with pytest.raises(CommTimeoutError) as caught:
            while True:
                checks.round_trip(buffer, expected)
        return {"text": str(caught.value), "missing": caught.value.missing_ranks}


def survivors(outcomes: list[Outcome]) -> list[Outcome]:
    assert outcomes[LATE].exitcode == -signal.SIGKILL
    return [outcome for outcome in outcomes if outcome.rank != LATE]


def test_a_killed_rank_is_named_by_all_others_and_they_can_exit() -> None:
    """D25: SIGKILL leaves it no chance to tidy up."""
    start = time.monotonic()
    for outcome in survivors(process_outcomes(3, until_killed, 0.2, timeout=60)):
        assert outcome.ok, outcome.describe()
        assert LATE in outcome.value["missing"], outcome.value
        assert "rank" in outcome.value["text"] and "2 s" in outcome.value["text"]
    assert time.monotonic() - start < 50


def raise_when_killed(group: Any) -> None:
    expected = expect(THREE)
    with Buffer(group, timeout=2) as buffer:
        checks.round_trip(buffer, expected)  # all have connected
        if group.rank() == LATE:
            os.kill(os.getpid(), signal.SIGKILL)
        checks.round_trip(buffer, expected)


def test_an_error_that_nobody_catches_ends_the_process() -> None:
    """D25: no thread or destructor keeps a rank alive."""
    for outcome in survivors(process_outcomes(3, raise_when_killed, timeout=60)):
        assert isinstance(outcome.error, CommTimeoutError) and outcome.exitcode == 1
        assert outcome.error.missing_ranks == (LATE,)
