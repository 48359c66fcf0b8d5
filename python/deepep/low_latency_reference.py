"""What the low-latency operations mean, in plain torch: the definition that tests compare with.

Everything is computed for all ranks at once, from what each of them holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deepep import topology


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """What one rank receives.

    Attributes:
        rows: for each of its experts, rows [n, H] by source rank, then by token and selection.
        sources: for each expert, (rank, token, selection) of each row.
        layout_range: int64 [El, R]; rows from the rank | first of them << 32.
    """

    rows: list[torch.Tensor]
    sources: list[list[tuple[int, int, int]]]
    layout_range: torch.Tensor

    @property
    def counts(self) -> list[int]:
        """Rows of each expert."""
        return [len(sources) for sources in self.sources]


def dispatch(
    xs: Sequence[torch.Tensor], topk_idx: Sequence[torch.Tensor], num_experts: int
) -> list[ExpertRows]:
    """Every row to each of its experts.

    Args:
        xs: for each rank, rows [T, ...]; any tensors whose first dimension is the token, so scales
            as well.
        topk_idx: for each rank, [T, K] with -1 for none.
        num_experts: of the whole group.
    """
    num_ranks = len(xs)
    received = []
    for rank in range(num_ranks):
        experts = topology.expert_range(num_experts, num_ranks, rank)
        rows, sources = [], []
        layout_range = torch.zeros((len(experts), num_ranks), dtype=torch.int64)
        for e, expert in enumerate(experts):
            here: list[tuple[int, int, int]] = []
            for source in range(num_ranks):
                chosen = (topk_idx[source] == expert).nonzero().tolist()
                layout_range[e, source] = len(chosen) | len(here) << 32
                here += [(source, token, k) for token, k in chosen]
            picked = [xs[source][token] for source, token, _ in here]
            rows.append(
                torch.stack(picked) if picked else xs[rank].new_empty((0, *xs[0].shape[1:]))
            )
            sources.append(here)
        received.append(ExpertRows(rows, sources, layout_range))
    return received


def combine(
    expert_rows: Sequence[Sequence[torch.Tensor]],
    received: Sequence[ExpertRows],
    topk_weights: Sequence[torch.Tensor],
    hidden: int,
) -> list[torch.Tensor]:
    """Each token's rows times their weights, in FP32, in the order of its selections, as BF16.

    Args:
        expert_rows: for each rank and each of its experts, BF16 rows as `received` has them.
        received: what dispatch returned.
        topk_weights: for each rank, float32 [T, K].
        hidden: elements of a row.
    """
    sums = []
    for rank, weights in enumerate(topk_weights):
        num_tokens, num_topk = weights.shape
        found: dict[tuple[int, int], torch.Tensor] = {}
        for rows_of_rank, there in zip(expert_rows, received, strict=True):
            for rows, sources in zip(rows_of_rank, there.sources, strict=True):
                for row, (source, token, k) in zip(rows, sources, strict=False):
                    if source == rank:
                        found[token, k] = row
        out = torch.zeros((num_tokens, hidden), dtype=torch.float32)
        for k in range(num_topk):
            for token in range(num_tokens):
                if (token, k) in found:
                    out[token] += weights[token, k] * found[token, k].float()
        sums.append(out.bfloat16())
    return sums
