"""The same model in one process: all experts, all ranks' tokens, no dispatch and no combine.

It rounds to BF16 where the sharded layer does, and nowhere else. Then both computations do the same
arithmetic, and what remains between them is the order of a few FP32 additions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepep.quickstart.batches import Batch
from deepep.quickstart.model import BALANCE, Model, normalise, run_experts


def moe_in_one_process(
    rows: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    owners: Sequence[range],
) -> torch.Tensor:
    """The MoE layer for the tokens of all ranks. bfloat16 [T, H].

    Args:
        rows, topk_idx, topk_weights: of all ranks, one after the other.
        up, down: float32 [E, H, I] and [E, I, H], all experts.
        owners: the experts of each rank: results are rounded once for each of them.
    """
    wide = rows.float()
    partial: dict[int, torch.Tensor] = {}
    # Backward visits the latest first, so that it adds the ranks' gradients in ascending order.
    for rank, local in reversed(list(enumerate(owners))):
        partial[rank] = _owned(wide, topk_idx, topk_weights, up, down, local)
    total = torch.zeros_like(wide)
    for rank in range(len(owners)):
        total = total + partial[rank].float()
    return total.bfloat16()


def _owned(
    wide: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    local: range,
) -> torch.Tensor:
    """Each token's weighted sum over the experts of one rank. bfloat16 [T, H]."""
    mine = slice(local.start, local.stop)
    # By token, then by slot: the order in which both directions add.
    row, slot = ((topk_idx >= local.start) & (topk_idx < local.stop)).nonzero(as_tuple=True)
    expert = topk_idx[row, slot] - local.start
    order = expert.argsort(stable=True)
    counts = torch.bincount(expert, minlength=len(local)).tolist()
    # bfloat16() rounds nothing forward. Backward it does: the gradient of each rank's copies, and
    # before that of each expert's.
    copies = wide.bfloat16().float().index_select(0, row).bfloat16()
    y = run_experts(copies.index_select(0, order), counts, up[mine], down[mine])
    weighted = y.float().index_select(0, order.argsort()) * topk_weights[row, slot, None]
    return torch.zeros_like(wide).index_add(0, row, weighted).bfloat16()


def train_in_one_process(
    model: Model,
    up: torch.Tensor,
    down: torch.Tensor,
    batches: Sequence[Batch],
    owners: Sequence[range],
) -> dict[str, torch.Tensor]:
    """Forward and backward for all ranks' batches.

    Args:
        model: its replicated part is used; the gradients of that are set to their mean over ranks.
        up, down: all experts' matrices, with requires_grad.

    Returns:
        The tensors to compare, by the names that check gives them.
    """
    # Rank by rank, because sums over tokens then have the same shape as on the ranks.
    residuals = [model.embed(batch) for batch in batches]
    rows = [normalise(residual).bfloat16() for residual in residuals]
    ids, weights, balance_loss = [], [], torch.zeros(())
    for item in rows:
        item.retain_grad()
        topk_idx, topk_weights = model.router(item)
        ids.append(topk_idx)
        weights.append(topk_weights)
        balance_loss = balance_loss + model.router.balance_loss
    combined = moe_in_one_process(
        torch.cat(rows), torch.cat(ids), torch.cat(weights), up, down, owners
    )
    loss = BALANCE * balance_loss
    parts = torch.split(combined, [len(batch.targets) for batch in batches])
    for residual, part, batch in zip(residuals, parts, batches, strict=True):
        loss = loss + model.loss(residual, part, batch)
    torch.autograd.backward(loss)

    def gradient(*tensors: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor.grad for tensor in tensors if tensor.grad is not None])

    mean = 1 / len(batches)
    return {
        "output of the layer": combined.detach(),
        "gradient of its rows": gradient(*rows),
        "gradient of top-k weights": gradient(*weights),
        "gradient of experts, up": gradient(up) * mean,
        "gradient of experts, down": gradient(down) * mean,
        **{
            f"gradient of {name}": gradient(parameter) * mean
            for name, parameter in model.replicated().items()
        },
    }
