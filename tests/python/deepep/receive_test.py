"""No memory for what arrives: how much was needed, what there is, what would fit."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from deepep import Buffer, BufferStateError, CapacityError, receive, sizes

TOKENS, HIDDEN, TOPK, EXPERTS = 5, 64, 2, 4
ROW = sizes.receive_layout(1, HIDDEN, 2, 0, TOPK).total
FREE = 3 * ROW + 7


@pytest.fixture
def buffer() -> Iterator[Buffer]:
    with Buffer(device="cpu") as made:
        yield made


def arguments(buffer: Buffer) -> dict[str, Any]:
    ids = torch.arange(TOKENS * TOPK).view(TOKENS, TOPK) % EXPERTS
    layout = buffer.get_dispatch_layout(ids, EXPERTS)
    return {
        "x": torch.ones((TOKENS, HIDDEN), dtype=torch.bfloat16),
        "num_tokens_per_rank": layout[0],
        "is_token_in_rank": layout[3],
        "num_tokens_per_expert": layout[2],
        "topk_idx": ids,
        "topk_weights": torch.ones((TOKENS, TOPK)),
    }


def without_memory(buffer: Buffer, error: Exception, after: int = 0) -> Any:
    """A machine with FREE bytes, on which the `after`-th allocation fails."""
    real, made = buffer._engine.piece, []

    def piece(*parts: Any) -> Any:
        made.append(parts)
        if len(made) > after:
            raise error
        return real(*parts)

    return mock.patch.multiple(buffer._engine, create=False, piece=piece, free_bytes=lambda: FREE)


@pytest.mark.parametrize("error", [MemoryError("x"), receive.OUT_OF_MEMORY[1]("y")], ids=repr)
@pytest.mark.parametrize("after", [0, 1])
def test_the_numbers_are_told(buffer: Buffer, error: Exception, after: int) -> None:
    given = arguments(buffer)
    with without_memory(buffer, error, after), pytest.raises(CapacityError) as caught:
        buffer.dispatch(**given)
    assert caught.value.__cause__ is error
    row = ROW if after else ROW - 12 * TOPK  # ids and weights are not what failed first
    text = str(caught.value)
    assert f"{TOKENS} rows of {row} bytes are {TOKENS * row} bytes" in text
    assert f"about {FREE} are free on cpu" in text
    assert f"{FREE // row} rows fit, which {FREE // row} tokens on each of 1 ranks" in text


def test_after_counts_were_told_all_ranks_have_to_reset(buffer: Buffer) -> None:
    given = arguments(buffer)
    with without_memory(buffer, MemoryError()), pytest.raises(CapacityError) as caught:
        buffer.dispatch(**given)
    assert "reset() on all ranks" in caught.value.__notes__[0]
    with pytest.raises(BufferStateError, match=r"reset\(\)"):
        buffer.dispatch(**given)
    buffer.reset()
    assert buffer.dispatch(**given)[3] == [3, 3, 2, 2]


def test_a_fixed_size_or_a_known_routing_is_refused_before_anything_is_sent(
    buffer: Buffer,
) -> None:
    given = arguments(buffer)
    handle = buffer.dispatch(**given)[4]
    with without_memory(buffer, MemoryError()):
        with pytest.raises(CapacityError, match=r"^There is no memory"):
            buffer.dispatch(**given, num_worst_tokens=TOKENS)
        with pytest.raises(CapacityError, match=r"^There is no memory"):
            buffer.dispatch(given["x"], handle=handle)
    buffer.dispatch(given["x"], handle=handle)
    buffer.dispatch(**given, num_worst_tokens=TOKENS)


def test_more_than_the_address_space_is_refused_in_these_words(buffer: Buffer) -> None:
    """What really happens, not only what a stand-in does."""
    given = arguments(buffer) | {"x": torch.ones((TOKENS, 1 << 19), dtype=torch.bfloat16)}
    with pytest.raises(CapacityError, match=r"2147483647 rows of 1048580 bytes") as caught:
        buffer.dispatch(**given, num_worst_tokens=2**31 - 1)
    assert "cannot map shared memory" in str(caught.value.__cause__)
    assert buffer.dispatch(**given)[0][0, 0] == 1
