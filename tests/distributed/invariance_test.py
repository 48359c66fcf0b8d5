"""A token's result has the same bits whatever the number of SMs, its rank, and its company."""

import pytest
import torch
from deepep import Buffer, Config
from deepep.testing import ThreadGroup, run_ranks
from torch import Tensor

from tests.distributed.cases import DEVICE

RANKS, EXPERTS, TOPK, HIDDEN, TOKENS = 4, 8, 4, 264, 12
# Two ranks' large results cancel each other, and what is left of the small ones tells the order.
FACTORS = torch.tensor([1.25, 0.75, 2.0**20, 2.0**19, -(2.0**20), -(2.0**19), 1.5, 3.25])


def routed() -> tuple[Tensor, Tensor, Tensor]:
    """Rows, ids and weights; the weights of a token are equal."""
    g = torch.Generator().manual_seed(5)
    x = torch.randn(TOKENS, HIDDEN, generator=g).bfloat16()
    ids = torch.rand(TOKENS, EXPERTS, generator=g).argsort(1)[:, :TOPK]
    return x, ids, torch.rand(TOKENS, 1, generator=g).expand(TOKENS, TOPK).contiguous()


def experts(rows: Tensor, ids: Tensor, weights: Tensor, rank: int) -> Tensor:
    """Element-wise, so that a row's result does not depend on other rows."""
    mine = FACTORS.to(rows.device).view(RANKS, -1)[rank]
    factor = (weights * torch.where(ids >= 0, mine[ids.clamp(min=0)], 0.0)).sum(1, keepdim=True)
    return (rows.float() * factor).bfloat16()


def results(places: list[list[int]], config: Config | None = None) -> dict[int, Tensor]:
    """The result of each token when rank r sends the tokens places[r], in this order."""
    x, ids, weights = routed()

    def work(group: ThreadGroup) -> Tensor:
        mine = torch.tensor(places[group.rank()], dtype=torch.long)
        on_device = [part[mine].to(DEVICE) for part in (x, ids, weights)]
        with Buffer(group, device=DEVICE, timeout=20) as buffer:
            per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(on_device[1], EXPERTS)
            rows, local, local_weights, _, handle, _ = buffer.dispatch(
                on_device[0],
                num_tokens_per_rank=per_rank,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=on_device[1],
                topk_weights=on_device[2],
                config=config,
            )
            assert isinstance(rows, Tensor) and local is not None and local_weights is not None
            y = experts(rows, local, local_weights, buffer.rank)
            return buffer.combine(y, handle, config=config)[0].cpu()

    ranks = run_ranks(RANKS, work)
    return {
        token: out[index]
        for tokens, out in zip(places, ranks, strict=True)
        for index, token in enumerate(tokens)
    }


def spread(shift: int) -> list[list[int]]:
    """All tokens over all ranks; `shift` moves each to another rank."""
    return [
        [token for token in range(TOKENS) if (token + shift) % RANKS == rank]
        for rank in range(RANKS)
    ]


def same(got: dict[int, Tensor], want: dict[int, Tensor]) -> None:
    for token, row in got.items():
        assert torch.equal(row, want[token]), f"token {token} has other bits"


def test_sums_are_such_that_their_order_shows() -> None:
    """Else the other tests would see nothing."""
    x, ids, weights = routed()
    parts = [
        experts(
            x, torch.where(ids // 2 == rank, ids % 2, -1), weights * (ids // 2 == rank), rank
        ).float()
        for rank in range(RANKS)
    ]
    rising = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    falling = ((parts[3] + parts[2]) + parts[1]) + parts[0]
    different = (rising.bfloat16() != falling.bfloat16()).any(1)
    assert int(different.sum()) >= TOKENS // 4
    out = results(spread(0))
    assert torch.equal(torch.stack([out[token] for token in range(TOKENS)]), rising.bfloat16())


@pytest.mark.parametrize("num_sms", [2, 8, 24])
def test_the_number_of_sms_changes_no_bit(num_sms: int) -> None:
    same(results(spread(0), Config(num_sms, 6, 256)), results(spread(0)))


@pytest.mark.parametrize("shift", range(1, RANKS))
def test_the_rank_of_a_token_changes_no_bit(shift: int) -> None:
    same(results(spread(shift)), results(spread(0)))


@pytest.mark.parametrize("token", [0, 5, 11])
@pytest.mark.parametrize("rank", [0, RANKS - 1])
def test_a_token_alone_has_the_bits_that_it_has_in_a_batch(token: int, rank: int) -> None:
    alone: list[list[int]] = [[] for _ in range(RANKS)]
    alone[rank] = [token]
    same(results(alone), results(spread(0)))


def test_the_order_of_tokens_changes_no_bit() -> None:
    everything = list(range(TOKENS))
    same(results([[], everything[::-1], [], []]), results([everything, [], [], []]))
