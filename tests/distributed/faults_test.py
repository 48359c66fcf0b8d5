"""Late, dead and contradicting ranks: who is told what, and that reset() brings all back (D25).

The ranks are threads. A wait lasts TIMEOUT seconds unless a test says otherwise.
"""

import gc
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
from deepep import Buffer, BufferStateError, CapacityError, CommTimeoutError
from deepep.testing import ThreadGroup, run_ranks

from tests.distributed import checks
from tests.distributed.cases import FAULT_CASE, Case
from tests.distributed.checks import Expected, expect

TIMEOUT = 1.0
LATE = 2  # the rank that misbehaves


@pytest.fixture(scope="module")
def expected() -> Expected:
    return expect(FAULT_CASE)


def timed_out(buffer: Buffer, call: Callable[[], object]) -> CommTimeoutError:
    """The timeout that `call` ends in."""
    with pytest.raises(CommTimeoutError) as caught:
        call()
    assert caught.value.rank == buffer.rank
    return caught.value


# ---- A rank that does not come in time


def test_a_late_rank_is_named_and_enough_patience_finishes_right(expected: Expected) -> None:
    """D25: rank 2 comes after 5 s. With 2 s of patience that is an error, with 20 s it is none."""

    def work(group: ThreadGroup) -> None:
        with Buffer(group, timeout=2) as buffer:
            checks.round_trip(buffer, expected)
            handle = checks.dispatch(buffer, expected)[4]
            if group.rank() == LATE:
                time.sleep(5)
                error = timed_out(buffer, lambda: checks.combine(buffer, expected, handle))
                assert error.missing_ranks == (0, 1, 3)
            else:
                start = time.monotonic()
                error = timed_out(buffer, lambda: checks.combine(buffer, expected, handle))
                assert 2 <= time.monotonic() - start < 4.5
                assert (error.operation, error.sequence) == ("combine", 2)
                assert error.missing_ranks == (LATE,)
                assert "combine #2" in str(error) and "rank 2" in str(error) and "2 s" in str(error)
                assert "DEEPEP_TIMEOUT" in str(error)
        with Buffer(group, timeout=20) as buffer:
            if group.rank() == LATE:
                time.sleep(5)
            checks.round_trip(buffer, expected)

    run_ranks(4, work)


def test_a_rank_that_never_comes_is_named_and_all_others_go_on(expected: Expected) -> None:
    """D25: the others end, and can be destroyed, while rank 2 is still away."""
    others_are_done = threading.Barrier(4, timeout=60)

    def work(group: ThreadGroup) -> None:
        with Buffer(group, timeout=TIMEOUT) as buffer:
            if group.rank() != LATE:
                error = timed_out(buffer, lambda: checks.dispatch(buffer, expected))
                assert (error.operation, error.sequence) == ("notify", 1)
                assert error.missing_ranks == (LATE,)
                assert error.phase == "token counts"
        others_are_done.wait()

    run_ranks(4, work)


def test_check_tells_whether_the_buffer_can_go_on(expected: Expected) -> None:
    def work(group: ThreadGroup) -> None:
        with Buffer(group, timeout=TIMEOUT) as buffer:
            checks.round_trip(buffer, expected)
            buffer.check()
            if group.rank() != LATE:
                timed_out(buffer, lambda: checks.dispatch(buffer, expected))
                with pytest.raises(BufferStateError, match=r"reset\(\)"):
                    buffer.check()
            buffer.reset()
            buffer.check()
        with pytest.raises(BufferStateError, match="destroyed"):
            buffer.check()

    run_ranks(4, work)


def test_the_timeout_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """D25: DEEPEP_TIMEOUT counts where the argument is left out."""
    monkeypatch.setenv("DEEPEP_TIMEOUT", "0.25")
    two = expect(Case("two", (1, 1)))

    def work(group: ThreadGroup) -> None:
        with Buffer(group) as by_environment, Buffer(group, timeout=7) as by_argument:
            assert (by_environment.timeout, by_argument.timeout) == (0.25, 7)
            if group.rank() == 0:
                start = time.monotonic()
                error = timed_out(by_environment, lambda: checks.dispatch(by_environment, two))
                assert error.missing_ranks == (1,) and time.monotonic() - start < 5
            group.barrier()

    run_ranks(2, work)


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", "inf"])
def test_a_senseless_timeout_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("DEEPEP_TIMEOUT", text)
    with pytest.raises(ValueError, match=f"DEEPEP_TIMEOUT='{text}'.*above 0"):
        Buffer()


def test_a_rank_that_has_no_memory_for_its_rows_is_out_of_step(expected: Expected) -> None:
    """Its peers have its counts by then: a second try would meet their first."""

    def work(group: ThreadGroup) -> None:
        with Buffer(group, timeout=TIMEOUT) as buffer:
            checks.round_trip(buffer, expected)
            if group.rank() == LATE:
                no_memory = mock.patch.object(buffer._engine, "piece", side_effect=MemoryError)
                with no_memory, pytest.raises(CapacityError, match="no memory"):
                    checks.dispatch(buffer, expected)
                with pytest.raises(BufferStateError, match=r"reset\(\)"):
                    checks.dispatch(buffer, expected)
            else:
                error = timed_out(buffer, lambda: checks.dispatch(buffer, expected))
                assert (error.operation, error.missing_ranks) == ("dispatch", (LATE,))
            buffer.reset()
            checks.round_trip(buffer, expected)

    run_ranks(4, work)


class Forgetful(list[object]):
    """A limbo that keeps nothing: as on a GPU, where a caller can drop tensors before the fault is
    seen."""

    def extend(self, items: Any, /) -> None:
        """Lets go of the items."""


def late_half(
    expected: Expected, operation: Callable[[Buffer, Any], object], is_told: bool = True
) -> None:
    """Rank 2 begins `operation` only after the others gave up, and meets their traces.

    It is told so, where they had come as far as to say where their memory is; and it does not touch
    what they made in the meantime.
    """

    def work(group: ThreadGroup) -> None:
        with Buffer(group, timeout=TIMEOUT) as buffer:
            handle = checks.round_trip(buffer, expected)
            buffer._engine._limbo = Forgetful()
            for _ in range(2):
                fresh, call = [], partial(operation, buffer, handle)
                if group.rank() == LATE:
                    time.sleep(1.6 * TIMEOUT)
                    start = time.monotonic()
                    text = str(timed_out(buffer, call))
                    if is_told:
                        assert "came too late: ranks 0, 1, 3 had given up" in text
                        assert time.monotonic() - start < TIMEOUT / 2 + 0.3, "it has not waited"
                else:
                    assert timed_out(buffer, call).missing_ranks == (LATE,)
                    gc.collect()
                    fresh = [buffer.empty(33, 64).fill_(group.rank() + 1) for _ in range(20)]
                buffer.reset()
                for tensor in fresh:
                    assert bool((tensor == group.rank() + 1).all()), "written to by the late rank"
                checks.combine(buffer, expected, handle)
                handle = checks.round_trip(buffer, expected)

    run_ranks(4, work)


def test_a_late_dispatch_after_the_others_gave_up_does_no_harm(expected: Expected) -> None:
    late_half(expected, lambda buffer, handle: checks.dispatch(buffer, expected), is_told=False)


def test_a_late_cached_dispatch_after_the_others_gave_up_does_no_harm(expected: Expected) -> None:
    def again(buffer: Buffer, handle: Any) -> None:
        buffer.dispatch(checks.payload(buffer, expected), handle=handle)

    late_half(expected, again)


def test_a_late_combine_after_the_others_gave_up_does_no_harm(expected: Expected) -> None:
    late_half(expected, lambda buffer, handle: checks.combine(buffer, expected, handle))
