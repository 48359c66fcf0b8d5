"""Small fixed-size outputs, wrong states, confused operations: refused, and mended by reset()."""

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepep import (
    Buffer,
    BufferStateError,
    CapacityError,
    CommTimeoutError,
    RankMismatchError,
)
from deepep.testing import ThreadGroup, run_ranks

from tests.distributed import checks, guards
from tests.distributed.cases import FAULT_CASE, find
from tests.distributed.checks import Expected, expect

ODD = 1  # the rank that misbehaves


@pytest.fixture(scope="module")
def expected() -> Expected:
    return expect(FAULT_CASE)


# ---- Fixed-size outputs that are too small


def test_too_small_a_fixed_size_is_an_error_there_and_no_row_is_written_past_it() -> None:
    want = expect(find("plain", 4))

    def work(group: ThreadGroup) -> None:
        with Buffer(group, timeout=20) as buffer:
            received = want.received(group.rank())
            size = received - 20 if group.rank() == ODD else received
            between = guards.place(buffer, guards.exported_bytes(want, group.rank(), size))
            if group.rank() == ODD:
                with pytest.raises(CapacityError) as caught:
                    checks.dispatch(buffer, want, num_worst_tokens=size)
                assert f"{received} rows arrive" in str(caught.value)
                assert f"holds {size}" in str(caught.value)
                assert "num_worst_tokens" in str(caught.value)
            else:
                x, *_ = checks.dispatch(buffer, want, num_worst_tokens=size)
                checks.same_payload("recv_x", x, want.dispatched[group.rank()].recv_x)
            buffer.reset()
            guards.check(between)
            checks.round_trip(buffer, want)

    run_ranks(4, work)


def test_too_small_on_all_ranks_is_an_error_on_all_ranks() -> None:
    want = expect(find("plain", 4))

    def work(group: ThreadGroup) -> None:
        with Buffer(group, timeout=20) as buffer:
            for _ in range(3):
                with pytest.raises(CapacityError, match="holds 1"):
                    checks.dispatch(buffer, want, num_worst_tokens=1)
                buffer.reset()
                checks.round_trip(buffer, want)

    run_ranks(4, work)


def test_more_rows_than_row_numbers_are_refused_before_anything_is_sent(expected: Expected) -> None:
    """A corrected call may follow: the other ranks have not begun anything with this one."""

    def work(group: ThreadGroup) -> None:
        with Buffer(group, timeout=5) as buffer:
            if group.rank() == ODD:
                with pytest.raises(ValueError, match=r"num_worst_tokens.*2147483648.*2147483647"):
                    checks.dispatch(buffer, expected, num_worst_tokens=2**31)
            checks.round_trip(buffer, expected)

    run_ranks(4, work)


# ---- States


def test_after_destroy_every_call_says_so(expected: Expected) -> None:
    def work(group: ThreadGroup) -> None:
        buffer = Buffer(group, timeout=20)
        handle = checks.round_trip(buffer, expected)
        kept = checks.dispatch(buffer, expected)
        buffer.destroy()
        buffer.destroy()
        ids = torch.zeros((1, 1), dtype=torch.int64)
        calls: list[Callable[[], object]] = [
            lambda: buffer.get_dispatch_layout(ids, 8),
            lambda: buffer.dispatch(checks.payload(buffer, expected), handle=handle),
            lambda: buffer.combine(expected.outputs[buffer.rank], handle),
            lambda: buffer.empty(1, 8),
            buffer.reset,
            buffer.memory_bytes,
        ]
        for call in calls:
            with pytest.raises(BufferStateError, match="destroyed"):
                call()
        # Results outlive the Buffer.
        checks.check_dispatched(kept, expected, group.rank())

    run_ranks(4, work)


def test_a_handle_of_another_buffer_is_refused_before_anything_is_sent(expected: Expected) -> None:
    def work(group: ThreadGroup) -> None:
        with Buffer(group, timeout=20) as buffer, Buffer(group, timeout=20) as other:
            handle = checks.round_trip(buffer, expected)
            foreign = checks.round_trip(other, expected)
            if group.rank() == ODD:
                with pytest.raises(BufferStateError, match="comes from Buffer"):
                    buffer.combine(expected.outputs[ODD], foreign)
                with pytest.raises(BufferStateError, match="comes from Buffer"):
                    buffer.dispatch(checks.payload(buffer, expected), handle=foreign)
                with pytest.raises(TypeError, match="unchanged"):
                    buffer.combine(expected.outputs[ODD], tuple(handle))
            checks.combine(buffer, expected, handle)
            checks.combine(other, expected, foreign)

    run_ranks(4, work)


# ---- Any fault, any number of times


def _too_late(buffer: Buffer, expected: Expected, handle: Any) -> None:
    if buffer.rank == ODD:
        time.sleep(0.8)
    with pytest.raises(CommTimeoutError):
        checks.dispatch(buffer, expected)


def _never(buffer: Buffer, expected: Expected, handle: Any) -> None:
    if buffer.rank != ODD:
        with pytest.raises(CommTimeoutError):
            checks.combine(buffer, expected, handle)


def _other_operation(buffer: Buffer, expected: Expected, handle: Any) -> None:
    call = checks.combine if buffer.rank == ODD else checks.dispatch
    with pytest.raises(CommTimeoutError):
        call(buffer, expected, *([handle] if buffer.rank == ODD else []))


def _cached_and_not(buffer: Buffer, expected: Expected, handle: Any) -> None:
    x = checks.payload(buffer, expected)
    with pytest.raises(CommTimeoutError):
        if buffer.rank == ODD:
            buffer.dispatch(x, handle=handle)
        else:
            checks.dispatch(buffer, expected)


def _mismatch(buffer: Buffer, expected: Expected, handle: Any) -> None:
    hidden = 128 if buffer.rank == ODD else 64
    with pytest.raises(RankMismatchError):
        buffer.combine(buffer.empty(expected.rows(buffer.rank), hidden), handle)


def _too_small(buffer: Buffer, expected: Expected, handle: Any) -> None:
    if expected.received(buffer.rank) > 1:
        with pytest.raises(CapacityError):
            checks.dispatch(buffer, expected, num_worst_tokens=1)
    else:
        checks.dispatch(buffer, expected, num_worst_tokens=1)


def _one_rank_is_ahead(buffer: Buffer, expected: Expected, handle: Any) -> None:
    for _ in range(3):
        checks.round_trip(buffer, expected)
    _never(buffer, expected, handle)


FAULTS = [_too_late, _never, _other_operation, _cached_and_not, _mismatch, _too_small]
FAULTS.append(_one_rank_is_ahead)


@pytest.mark.parametrize("seed", range(3))
def test_any_faults_in_a_row_leave_a_buffer_that_works(expected: Expected, seed: int) -> None:
    order = random.Random(seed).choices(FAULTS, k=10)
    special = [expect(find("fixed_size", 4)), expect(find("fp8_packed_scales", 4))]

    def work(group: ThreadGroup) -> None:
        with Buffer(group, timeout=0.5) as buffer:
            handles = [checks.round_trip(buffer, expected)]
            for fault in order:
                fault(buffer, expected, handles[0])
                buffer.reset()
                for handle in handles:
                    checks.combine(buffer, expected, handle)
                handles.append(checks.round_trip(buffer, expected))
                for case in special:
                    checks.round_trip(buffer, case)

    run_ranks(4, work)


def test_reset_without_a_fault_changes_nothing(expected: Expected) -> None:
    def work(group: ThreadGroup) -> None:
        with Buffer(group, timeout=20) as buffer:
            for _ in range(5):
                buffer.reset()
                handle = checks.round_trip(buffer, expected)
                buffer.reset()
                checks.combine(buffer, expected, handle)

    run_ranks(4, work)
