"""Dispatch and combine in plain torch, for all ranks at once, in one process.

The definition that the tests compare with, bit for bit: it fixes the order of rows and of
additions. Written to be read, not to be fast. Runs without kernels, GPU or process group.

Definitions:
    * A token goes once to every rank that owns at least one of its experts.
    * Received rows are ordered by source rank, then by the token's index on that rank.
    * Combine adds in FP32: bias_0 + bias_1 first, then the rows of the ranks that received the
      token, ascending by rank, and rounds to BF16 once. The sum starts at +0.
    * Across nodes the rows of each node's ranks are summed so first, and rounded; then bias_0,
      bias_1 and the nodes that received the token, ascending, are.
    * Top-k weights are routed back and summed the same way, without rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deepep.topology import expert_owner, expert_range

Payload = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""BF16 rows [T, H], or FP8 rows with their scales [T, words]."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What get_dispatch_layout returns on one rank (T tokens, R ranks, E experts).

    Attributes:
        num_tokens_per_rank: int32 [R]; tokens with at least one expert there.
        num_tokens_per_expert: int32 [E]; selections.
        is_token_in_rank: bool [T, R].
    """

    num_tokens_per_rank: torch.Tensor
    num_tokens_per_expert: torch.Tensor
    is_token_in_rank: torch.Tensor


@dataclass(frozen=True, slots=True)
class Dispatched:
    """What one rank holds after a dispatch: n rows, K choices, R ranks, El local experts, T tokens.

    Attributes:
        recv_x: rows [n, H], or (rows, row-major scales).
        recv_topk_idx: [n, K] local expert or -1, in the type of the ids; None if none were given.
        recv_topk_weights: float32 [n, K], 0 where the id is -1; None if none were given.
        recv_src_idx: int32 [n] token index on its source rank.
        rank_prefix_matrix: int32 [R, R]; [i, r] rows that rank r gets from ranks 0..i.
        send_head: int32 [T, R] row of the token in the receiver's tensor, or -1.
        num_recv_tokens_per_expert: int32 [El] received selections, not aligned.
        layout: what the rank's layout was.
    """

    recv_x: Payload
    recv_topk_idx: torch.Tensor | None
    recv_topk_weights: torch.Tensor | None
    recv_src_idx: torch.Tensor
    rank_prefix_matrix: torch.Tensor
    send_head: torch.Tensor
    num_recv_tokens_per_expert: torch.Tensor
    layout: Layout

    def aligned_counts(self, expert_alignment: int = 1) -> list[int]:
        """The per-expert list that dispatch returns: counts rounded up to the alignment."""
        counts = self.num_recv_tokens_per_expert.tolist()
        return [-(-count // expert_alignment) * expert_alignment for count in counts]


@dataclass(frozen=True, slots=True)
class Combined:
    """What one rank holds after a combine: BF16 [T, H], and float32 [T, K] or None."""

    combined_x: torch.Tensor
    combined_topk_weights: torch.Tensor | None


def layout_reference(topk_idx: torch.Tensor, num_ranks: int, num_experts: int) -> Layout:
    """The layout of one rank's tokens.

    Args:
        topk_idx: int32 or int64 [T, K]; -1 means no selection.
        num_ranks: ranks of the group.
        num_experts: experts of the group.
    """
    tokens = topk_idx.shape[0]
    owners = [expert_owner(expert, num_experts, num_ranks) for expert in range(num_experts)]
    per_expert = torch.zeros(num_experts, dtype=torch.int32)
    in_rank = torch.zeros(tokens, num_ranks, dtype=torch.bool)
    for token, experts in enumerate(topk_idx.tolist()):
        for expert in experts:
            if expert >= 0:
                per_expert[expert] += 1
                in_rank[token, owners[expert]] = True
    return Layout(in_rank.sum(0).to(torch.int32), per_expert, in_rank)


def _rows(xs: Sequence[Payload], sources: Sequence[tuple[int, int]]) -> Payload:
    """Gathers rows given as (rank, token) pairs; scales come back row-major."""

    def gather(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        picked = [tensors[rank][token] for rank, token in sources]
        return torch.stack(picked) if picked else tensors[0].new_empty((0, tensors[0].shape[1]))

    if isinstance(xs[0], tuple):
        # Indexing FP8 is not implemented everywhere; bytes are.
        data = gather([x[0].view(torch.uint8) for x in xs]).view(xs[0][0].dtype)
        return data, gather([x[1] for x in xs]).contiguous()
    return gather([x for x in xs if isinstance(x, torch.Tensor)])


def _local_choices(
    topk_idx: torch.Tensor, topk_weights: torch.Tensor, local: range
) -> tuple[torch.Tensor, torch.Tensor]:
    """Global ids -> ids within `local` or -1, and their weights or 0."""
    mine = (topk_idx >= local.start) & (topk_idx < local.stop)
    ids = torch.where(mine, topk_idx - local.start, torch.full_like(topk_idx, -1))
    return ids, torch.where(mine, topk_weights, torch.zeros_like(topk_weights))


def dispatch_reference(
    xs: Sequence[Payload],
    topk_idxs: Sequence[torch.Tensor],
    topk_weights: Sequence[torch.Tensor] | None,
    num_experts: int,
) -> list[Dispatched]:
    """Dispatches every rank's tokens.

    Args:
        xs: for each rank its rows [T_r, H] (T_r may be 0), or (rows, scales).
        topk_idxs: for each rank its ids [T_r, K]; they decide the routing.
        topk_weights: for each rank float32 [T_r, K]; None: no top-k tensors travel.
        num_experts: experts of the group; need not divide by the ranks.

    Returns:
        One result for each rank.
    """
    num_ranks = len(xs)
    layouts = [layout_reference(ids, num_ranks, num_experts) for ids in topk_idxs]
    counts = torch.stack([layout.num_tokens_per_rank for layout in layouts])
    prefix = counts.cumsum(0).to(torch.int32)
    send_heads = [torch.full_like(lay.is_token_in_rank, -1, dtype=torch.int32) for lay in layouts]
    results = []
    for rank in range(num_ranks):
        sources = [
            (source, token)
            for source in range(num_ranks)
            for token in layouts[source].is_token_in_rank[:, rank].nonzero()[:, 0].tolist()
        ]
        for row, (source, token) in enumerate(sources):
            send_heads[source][token, rank] = row
        local = expert_range(num_experts, num_ranks, rank)
        per_expert = torch.stack(
            [lay.num_tokens_per_expert[local.start : local.stop] for lay in layouts]
        )
        ids: torch.Tensor | None = None
        weights: torch.Tensor | None = None
        if topk_weights is not None:
            all_ids, all_weights = _rows(topk_idxs, sources), _rows(topk_weights, sources)
            assert isinstance(all_ids, torch.Tensor) and isinstance(all_weights, torch.Tensor)
            ids, weights = _local_choices(all_ids, all_weights, local)
        results.append(
            Dispatched(
                recv_x=_rows(xs, sources),
                recv_topk_idx=ids,
                recv_topk_weights=weights,
                recv_src_idx=torch.tensor([token for _, token in sources], dtype=torch.int32),
                rank_prefix_matrix=prefix,
                send_head=send_heads[rank],
                num_recv_tokens_per_expert=per_expert.sum(0).to(torch.int32),
                layout=layouts[rank],
            )
        )
    return results


def combine_reference(
    xs: Sequence[torch.Tensor],
    dispatched: Sequence[Dispatched],
    topk_weights: Sequence[torch.Tensor] | None = None,
    biases: Sequence[Sequence[torch.Tensor]] | None = None,
    ranks_per_node: int | None = None,
) -> list[Combined]:
    """Sums the ranks' rows back at the tokens' origins, without weights.

    Args:
        xs: for each rank BF16 [n_r, H], in the order of its received rows.
        dispatched: what dispatch_reference returned.
        topk_weights: for each rank float32 [n_r, K], routed back as well.
        biases: for each rank no, one or two BF16 tensors [T_r, H].
        ranks_per_node: None: all ranks are one node.

    Returns:
        One result for each rank. A token that went nowhere gets the bias, or zeros.
    """
    num_ranks = len(xs)
    size = ranks_per_node or num_ranks
    results = []
    for rank, mine in enumerate(dispatched):
        total = torch.zeros(mine.send_head.shape[0], xs[rank].shape[1], dtype=torch.float32)
        for bias in biases[rank] if biases is not None else ():
            total += bias.float()
        if size == num_ranks:
            _add_rows(total, mine.send_head, xs, range(num_ranks))
        weights: torch.Tensor | None = None
        if topk_weights is not None:
            weights = torch.zeros(len(total), topk_weights[rank].shape[1], dtype=torch.float32)
        for first in range(0, num_ranks, size):
            node = range(first, first + size)
            sent = (mine.send_head[:, first : first + size] >= 0).any(1)
            if size < num_ranks:
                rows = torch.zeros_like(total)
                _add_rows(rows, mine.send_head, xs, node)
                total[sent] += rows[sent].to(torch.bfloat16).float()
            if weights is not None and topk_weights is not None:
                sums = torch.zeros_like(weights)
                _add_rows(sums, mine.send_head, topk_weights, node)
                weights[sent] += sums[sent]
        results.append(Combined(total.to(torch.bfloat16), weights))
    return results


def _add_rows(
    total: torch.Tensor, send_head: torch.Tensor, xs: Sequence[torch.Tensor], ranks: range
) -> None:
    """Adds each token's rows at these ranks, ascending."""
    for source in ranks:
        sent = send_head[:, source] >= 0
        total[sent] += xs[source][send_head[sent, source].long()].float()
