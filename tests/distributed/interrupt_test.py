"""Ctrl-C while a rank waits for another: the call ends at once, and reset() brings all back."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepep import Buffer, BufferStateError
from deepep.testing import run_processes

from tests.distributed import checks
from tests.distributed import low_latency_cases as decoding
from tests.distributed.cases import find
from tests.distributed.checks import expect

STEP = decoding.BASE
SECONDS = 60.0
"""Timeout of the waits; what is interrupted must end long before."""


def _calls(buffer: Buffer, kind: str) -> Callable[[], object]:
    """A call that waits for the other rank."""
    if kind == "dispatch":
        return lambda: checks.dispatch(buffer, expect(find("plain", 2)))
    if kind == "combine":
        expected = expect(find("plain", 2))
        handle = checks.round_trip(buffer, expected)
        outputs = checks.output_of(buffer, expected, exported=True)
        return lambda: buffer.combine(outputs, handle)
    return lambda: decoding.send(buffer, STEP, decoding.tokens_of(STEP, buffer.rank, 0))


def _interrupt_soon() -> None:
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()


def _one_rank_waits(group: Any, kind: str) -> float:
    """Rank 0 waits and is interrupted, rank 1 does not come; afterwards both go on."""
    size = Buffer.get_low_latency_rdma_size_hint(STEP.max_tokens, STEP.hidden, 2, STEP.experts)
    took = 0.0
    with Buffer(
        group, 0, size, low_latency_mode=True, timeout=SECONDS, enable_shrink=kind == "mask"
    ) as buffer:
        call = _calls(buffer, kind)
        torch.distributed.barrier(group=group)
        if group.rank() == 0:
            _interrupt_soon()
            start = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                call()
            took = time.monotonic() - start
            with pytest.raises(BufferStateError, match=r"interrupted by a signal|reset\(\)"):
                call()
        torch.distributed.barrier(group=group)
        buffer.reset()
        checks.round_trip(buffer, expect(find("plain", 2)))
        decoding.check_round(buffer, STEP, 1)
        if kind == "mask":
            status = torch.zeros(2, dtype=torch.int32)
            buffer.low_latency_query_mask_buffer(status)
            assert status.tolist() == [0, 0], (
                "an interrupted wait says nothing about the other rank"
            )
        torch.distributed.barrier(group=group)
    return took


@pytest.mark.parametrize("kind", ["dispatch", "combine", "decode", "mask"])
def test_a_wait_ends_at_once_and_reset_brings_all_back(kind: str) -> None:
    took = run_processes(2, _one_rank_waits, kind, timeout=120)
    assert took[0] < SECONDS / 4


def _raise(*_: object) -> None:
    raise RuntimeError("the handler's own")


def _other_handlers(group: Any) -> None:
    """A handler that returns changes nothing; one that raises ends the wait with its exception."""
    seen: list[int] = []
    with Buffer(group, timeout=SECONDS) as buffer:
        torch.distributed.barrier(group=group)
        if group.rank() == 0:
            signal.signal(signal.SIGALRM, lambda number, _: seen.append(number))
            signal.setitimer(signal.ITIMER_REAL, 0.2)
        else:
            time.sleep(1)
        checks.round_trip(buffer, expect(find("plain", 2)))
        torch.distributed.barrier(group=group)
        if group.rank() == 0:
            assert seen == [signal.SIGALRM]
            signal.signal(signal.SIGALRM, _raise)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(RuntimeError, match="the handler's own"):
                checks.dispatch(buffer, expect(find("plain", 2)))
        torch.distributed.barrier(group=group)
        buffer.reset()
        checks.round_trip(buffer, expect(find("plain", 2)))


def test_handlers_of_other_signals_run_during_a_wait() -> None:
    run_processes(2, _other_handlers, timeout=120)


def _one_node_waits(group: Any) -> float:
    """The same between two nodes of one rank, in a loop that looks after queues."""
    expected, took = expect(find("plain", 2), 1), 0.0
    with Buffer(group, device="cpu", ranks_per_node=1, timeout=SECONDS) as buffer:
        handle = checks.round_trip(buffer, expected)
        torch.distributed.barrier(group=group)
        if group.rank() == 0:
            _interrupt_soon()
            start = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                buffer.dispatch(checks.payload(buffer, expected), handle)
            took = time.monotonic() - start
        torch.distributed.barrier(group=group)
        buffer.reset()
        checks.round_trip(buffer, expected)
        torch.distributed.barrier(group=group)
    return took


def test_ctrl_c_ends_a_wait_for_another_node() -> None:
    assert run_processes(2, _one_node_waits, timeout=100)[0] < SECONDS / 4
