"""Missing, late and contradicting ranks, and bad input: the same words as on the host."""

import time
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from deepep import Buffer, BufferStateError, CommTimeoutError, RankMismatchError

from tests.distributed import checks
from tests.distributed.cases import FAULT_CASE, find
from tests.distributed.checks import Expected, expect
from tests.gpu.ranks import Rank, on_ranks

ODD = 2  # the rank that misbehaves
TIMEOUT = 1.0


def missed(buffer: Buffer, call: Callable[[], object]) -> CommTimeoutError:
    """The timeout that a call ends in: at once where the host waits, else at the next call."""
    with pytest.raises(CommTimeoutError) as caught:
        call()
        torch.cuda.synchronize()
        buffer.get_dispatch_layout(torch.zeros((1, 1), dtype=torch.int64, device="cuda"), 8)
    assert caught.value.rank == buffer.rank
    return caught.value


def operations(buffer: Buffer, expected: Expected, handle: Any) -> dict[str, Callable[[], object]]:
    outputs = checks.output_of(buffer, expected, exported=True)
    return {
        "dispatch": lambda: checks.dispatch(buffer, expected),
        "cached": lambda: buffer.dispatch(checks.payload(buffer, expected), handle=handle),
        "combine": lambda: buffer.combine(outputs, handle),
    }


@on_ranks(counts=(4,), choices=["dispatch", "cached", "combine"])
def test_a_missing_rank_is_named_and_reset_brings_all_back(rank: Rank, name: str) -> None:
    """D25"""
    expected = expect(FAULT_CASE)
    with rank.new_buffer(timeout=TIMEOUT) as buffer:
        handle = checks.round_trip(buffer, expected)
        torch.cuda.synchronize()
        rank.barrier()
        if rank.index != ODD:
            start = time.monotonic()
            error = missed(buffer, operations(buffer, expected, handle)[name])
            assert error.missing_ranks == (ODD,), str(error)
            assert f"rank {ODD}" in str(error) and f"{TIMEOUT:g} s" in str(error)
            assert time.monotonic() - start < 10
            with pytest.raises(BufferStateError, match=r"reset\(\)"):
                checks.layout(buffer, expected)
        rank.barrier()
        buffer.reset()
        checks.combine(buffer, expected, handle)
        checks.round_trip(buffer, expected)


@on_ranks(counts=(4,), choices=["cached", "combine"])
def test_a_late_rank_does_not_touch_memory_that_is_used_again(rank: Rank, name: str) -> None:
    """The others have given up, and have given their result's memory to other tensors."""
    expected = expect(FAULT_CASE)
    with rank.new_buffer(timeout=TIMEOUT) as buffer:
        handle = checks.round_trip(buffer, expected)
        calls = operations(buffer, expected, handle)
        torch.cuda.synchronize()
        rank.barrier()
        if rank.index == ODD:
            time.sleep(2 * TIMEOUT)
            error = missed(buffer, calls[name])
            assert "came too late" in str(error), str(error)
            fresh = []
        else:
            missed(buffer, calls[name])
            fresh = [buffer.empty(33, 64).fill_(rank.index + 1) for _ in range(20)]
        torch.cuda.synchronize()
        rank.barrier()
        for tensor in fresh:
            assert bool((tensor == rank.index + 1).all()), "written to by the late rank"
        buffer.reset()
        checks.round_trip(buffer, expected)


@on_ranks(counts=(4,))
def test_a_rank_that_is_3_seconds_late_is_waited_for(rank: Rank) -> None:
    """D25"""
    buffer, expected = rank.buffer(), expect(FAULT_CASE)
    handle = checks.round_trip(buffer, expected)
    rank.barrier()
    start = time.monotonic()
    if rank.index == ODD:
        time.sleep(3)
    checks.combine(buffer, expected, handle)
    torch.cuda.synchronize()  # a rank without tokens has nothing to look at
    assert time.monotonic() - start > 2.5


@on_ranks(counts=(4,))
def test_ranks_that_differ_in_shape_are_told_which_field(rank: Rank) -> None:
    expected = expect(FAULT_CASE)
    with rank.new_buffer(timeout=5) as buffer:
        handle = checks.round_trip(buffer, expected)
        hidden = 128 if rank.index == ODD else 64
        rows = expected.rows(rank.index)
        x = torch.zeros((rows, hidden), dtype=torch.bfloat16, device="cuda")
        with pytest.raises(RankMismatchError, match="row_bytes is"):
            buffer.combine(x, handle)
            torch.cuda.synchronize()
            checks.layout(buffer, expected)
        rank.barrier()
        buffer.reset()
        checks.round_trip(buffer, expected)


def bad_calls(device: str) -> dict[str, dict[str, Any]]:
    """Arguments that no dispatch accepts, each the replacement of good ones."""
    bf16 = torch.bfloat16
    return {
        "x of another type": {"x": torch.zeros((0, 64), device=device)},
        "x without scales": {"x": torch.zeros((0, 64), device=device).to(torch.float8_e4m3fn)},
        "rows of 14 bytes": {"x": torch.zeros((0, 7), dtype=bf16, device=device)},
        "rows with gaps": {"x": torch.zeros((3, 128), dtype=bf16, device=device)[:, :64]},
        "more tokens than ids": {"x": torch.zeros((3, 64), dtype=bf16, device=device)},
        "weights without ids": {"topk_idx": None},
        "ids of another type": {"topk_idx": torch.zeros((1, 3), device=device)},
        "no layout": {"is_token_in_rank": None},
        "counts of another shape": {
            "num_tokens_per_rank": torch.ones(5, dtype=torch.int32, device=device)
        },
        "alignment 0": {"expert_alignment": 0},
        "a negative fixed size": {"num_worst_tokens": -1},
        "more rows than row numbers": {"num_worst_tokens": 2**31},
        "handle and layout": {"handle": ()},
        "comm stream without events": {"allocate_on_comm_stream": True},
    }


def good_call(buffer: Buffer, expected: Expected, device: str) -> dict[str, Any]:
    mine = expected.inputs[buffer.rank]
    ids = mine.topk_idx.to(device)
    layout = buffer.get_dispatch_layout(ids, expected.case.num_experts)
    return {
        "x": cast(torch.Tensor, mine.x).to(device),
        "num_tokens_per_rank": layout[0],
        "is_token_in_rank": layout[3],
        "num_tokens_per_expert": layout[2],
        "topk_idx": ids,
        "topk_weights": mine.topk_weights.to(device),
    }


def refusal(buffer: Buffer, arguments: dict[str, Any]) -> tuple[str, str]:
    """Type and words of the error, the device left out."""
    with pytest.raises((ValueError, TypeError)) as caught:
        buffer.dispatch(**arguments)
    text = str(caught.value).replace(f"cuda:{torch.cuda.current_device()}", "cpu")
    return type(caught.value).__name__, text


@on_ranks(counts=(4,))
def test_bad_input_is_refused_in_the_words_of_the_host(rank: Rank) -> None:
    """Before anything is sent: the corrected call follows, and no rank waits in between."""
    buffer, expected = rank.buffer(), expect(FAULT_CASE)
    with Buffer(rank.group, device="cpu", timeout=20) as host:
        for name, change in bad_calls("cuda").items():
            if rank.index == ODD:
                said = refusal(buffer, good_call(buffer, expected, "cuda") | change)
                want = refusal(host, good_call(host, expected, "cpu") | bad_calls("cpu")[name])
                assert said == want, name
            checks.round_trip(buffer, expected)


@on_ranks(counts=(2,))
def test_tensors_of_another_device_are_refused(rank: Rank) -> None:
    buffer = rank.buffer()
    with pytest.raises(ValueError, match=r"topk_idx is on cpu, but this Buffer works on cuda"):
        buffer.get_dispatch_layout(torch.zeros((1, 1), dtype=torch.int64), 4)


@on_ranks(counts=(8,))
def test_many_sms_on_a_shared_device_do_not_block_it(rank: Rank) -> None:
    """Kernels of all ranks must be resident at once, however many SMs the caller asks for."""
    before = Buffer.num_sms
    Buffer.set_num_sms(128)
    try:
        checks.round_trip(rank.buffer(), expect(find("plain", rank.size)))
    finally:
        Buffer.set_num_sms(before)
