"""An MoE layer with one factor for each expert, in one piece: what every call pattern must compute.

All numbers are small integers, which BF16 holds exactly, so equality is exact.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.distributed.cases import DEVICE

NUM_EXPERTS, TOPK, HIDDEN = 8, 3, 256


@dataclass(frozen=True)
class Tokens:
    """One rank's tokens and their routing."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor


def tokens_of(rank: int) -> Tokens:
    """The same in every process; rank 1 has none, and some choices are of nothing."""
    g = torch.Generator().manual_seed(rank)
    count = 0 if rank == 1 else 6 + 5 * rank
    x = torch.randint(-2, 3, (count, HIDDEN), generator=g).bfloat16()
    ids = torch.rand((count, NUM_EXPERTS), generator=g).argsort(1)[:, :TOPK]
    ids = ids.masked_fill(torch.rand(ids.shape, generator=g) < 0.2, -1)
    weights = torch.randint(1, 4, ids.shape, generator=g).float()
    return Tokens(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE))


def factor(expert: Tensor) -> Tensor:
    """What each expert multiplies its rows with; 0 for no expert."""
    return torch.where(expert >= 0, expert % 4 + 1, 0).float()


def output(tokens: Tokens) -> Tensor:
    """The layer's result, bfloat16."""
    weights = tokens.topk_weights * factor(tokens.topk_idx)
    return (weights.sum(1, keepdim=True) * tokens.x.float()).bfloat16()


def run_experts(rows: Tensor, local_idx: Tensor, weights: Tensor, first_expert: int) -> Tensor:
    """A rank's share of each received row's result, from ids of its own experts."""
    ids = torch.where(local_idx >= 0, local_idx + first_expert, -1)
    return ((weights * factor(ids)).sum(1, keepdim=True) * rows.float()).bfloat16()


def counts_of(first_expert: int, num_local: int, num_ranks: int, alignment: int) -> list[int]:
    """Received choices of each of a rank's experts, rounded up."""
    ids = torch.cat([tokens_of(rank).topk_idx.flatten() for rank in range(num_ranks)])
    exact = [int((ids == first_expert + expert).sum()) for expert in range(num_local)]
    return [-(-count // alignment) * alignment for count in exact]
