"""Ranks that contradict each other or pass nonsense: told in words, and mended by reset()."""

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from deepep import Buffer, BufferStateError, CommTimeoutError, RankMismatchError
from deepep.testing import ThreadGroup, run_ranks

from tests.distributed import checks
from tests.distributed.cases import FAULT_CASE
from tests.distributed.checks import Expected, expect

ODD = 1  # the rank that differs

BAD: dict[str, dict[str, Any]] = {
    "x of another type": {"x": torch.zeros((0, 64))},
    "rows of 14 bytes": {"x": torch.zeros((0, 7), dtype=torch.bfloat16)},
    "more tokens than ids": {"x": torch.zeros((3, 64), dtype=torch.bfloat16)},
    "weights without ids": {"topk_idx": None},
    "no layout": {"is_token_in_rank": None},
    "counts that contradict the flags": {"num_tokens_per_rank": torch.ones(4, dtype=torch.int32)},
    "alignment 0": {"expert_alignment": 0},
    "a fixed size that cannot be": {"num_worst_tokens": -1},
    "handle and layout": {"handle": ()},
}


@pytest.fixture(scope="module")
def expected() -> Expected:
    return expect(FAULT_CASE)


def after_reset(buffer: Buffer, expected: Expected, handle: Any) -> None:
    """All is well again, with handles from before too."""
    with pytest.raises(BufferStateError, match=r"reset\(\)"):
        checks.layout(buffer, expected)
    with pytest.raises(BufferStateError, match=r"reset\(\)"):
        checks.combine(buffer, expected, handle)
    buffer.reset()
    checks.combine(buffer, expected, handle)
    checks.round_trip(buffer, expected)


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_bad_input_is_refused_on_its_rank_and_the_others_learn_which(
    expected: Expected, bad: dict[str, Any]
) -> None:
    def work(group: ThreadGroup) -> None:
        with Buffer(group, timeout=0.5) as buffer:
            if group.rank() == ODD:
                with pytest.raises((ValueError, TypeError)) as refused:
                    checks.dispatch(buffer, expected, **bad)
                assert not isinstance(refused.value, CommTimeoutError)
            else:
                with pytest.raises(CommTimeoutError) as caught:
                    checks.dispatch(buffer, expected)
                assert caught.value.missing_ranks == (ODD,)
            buffer.reset()
            checks.round_trip(buffer, expected)

    run_ranks(4, work)


def test_a_corrected_call_in_time_needs_no_reset(expected: Expected) -> None:
    def work(group: ThreadGroup) -> None:
        with Buffer(group, timeout=20) as buffer:
            for bad in BAD.values():
                if group.rank() == ODD:
                    with pytest.raises((ValueError, TypeError)):
                        checks.dispatch(buffer, expected, **bad)
                checks.round_trip(buffer, expected)

    run_ranks(4, work)


MISMATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "hidden": ({"hidden": 128}, "row_bytes is 128 here and 256 there"),
    "top-k": ({"num_topk": 5}, "num_topk is 3 here and 5 there"),
    "ids": ({"ids": torch.int32}, "index_type is int64 here and int32 there"),
    "no ids": ({"with_topk": False}, "num_topk is 3 here and 0 there"),
    "one expert more": ({"num_experts": 11}, "num_experts is 10 here and 11 there"),
    "more experts": ({"num_experts": 20}, "num_experts is 10 here and 20 there"),
    "fewer experts": ({"num_experts": 6}, "num_experts is 10 here and 6 there"),
    "payload": ({"payload": "fp8"}, "num_scales is 0 here and 1 there"),
}


@pytest.mark.parametrize("change, text", MISMATCHES.values(), ids=MISMATCHES.keys())
def test_a_mismatch_is_an_error_on_all_ranks_that_says_which_field(
    expected: Expected, change: dict[str, Any], text: str
) -> None:
    other = expect(replace(FAULT_CASE, **change))
    name, here, there = text.split(" is ")[0], *text.split(" is ")[1].split(" here and ")
    reverse = f"{name} is {there.removesuffix(' there')} here and {here} there"

    def work(group: ThreadGroup) -> None:
        with Buffer(group, timeout=5) as buffer:
            handle = checks.round_trip(buffer, expected)
            start = time.monotonic()
            is_odd = group.rank() == ODD
            with pytest.raises(RankMismatchError) as caught:
                checks.dispatch(buffer, other if is_odd else expected)
            assert time.monotonic() - start < 4, "told after the timeout only"
            assert (reverse if is_odd else text) in str(caught.value)
            assert ("ranks 0, 2, 3" if is_odd else "rank 1 ") in str(caught.value)
            group.barrier()
            after_reset(buffer, expected, handle)

    run_ranks(4, work)


@pytest.mark.parametrize(
    "hidden, num_topk, text",
    [(128, None, "row_bytes is"), (64, 3, "num_topk is"), (64, 4, "num_topk is")],
    ids=["hidden", "weights on one rank only", "top-k"],
)
def test_a_mismatch_of_combine_is_an_error_on_all_ranks(
    expected: Expected, hidden: int, num_topk: int | None, text: str
) -> None:
    def work(group: ThreadGroup) -> None:
        with Buffer(group, timeout=20) as buffer:
            handle = checks.round_trip(buffer, expected)
            rows, columns, width = expected.rows(group.rank()), 64, None
            if group.rank() == ODD:
                columns, width = hidden, num_topk
            elif num_topk == 4:
                width = 3
            x = torch.zeros((rows, columns), dtype=torch.bfloat16)
            weights = None if width is None else torch.zeros((rows, width))
            with pytest.raises(RankMismatchError, match=text) as caught:
                buffer.combine(x, handle, topk_weights=weights)
            assert "combine #2" in str(caught.value)
            group.barrier()
            after_reset(buffer, expected, handle)

    run_ranks(4, work)
