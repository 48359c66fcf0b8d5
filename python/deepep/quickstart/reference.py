"""The same model in one process: all experts, all ranks' tokens, no dispatch and no combine.

It rounds to BF16 where rows would travel, and nowhere else. Then both computations do the same
arithmetic, and what remains between them is the order of a few FP32 additions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepep.quickstart.batches import Batch
from deepep.quickstart.layer import BALANCE, Shared, run_experts


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
        up, down: float32 [E, H, H], all experts.
        owners: the experts of each rank: results are rounded once for each of them.
    """
    wide = rows.float()
    partial: dict[int, torch.Tensor] = {}
    # Backward visits the latest first, so that it adds the ranks' gradients in ascending order.
    for rank, local in reversed(list(enumerate(owners))):
        # Rounds nothing forward; backward, each rank's gradient becomes BF16 before it is added.
        copies = wide.bfloat16()
        mine = slice(local.start, local.stop)
        partial[rank] = run_experts(
            copies, topk_idx - local.start, topk_weights, up[mine], down[mine]
        )
    total = torch.zeros_like(wide)
    for rank in range(len(owners)):
        total = total + partial[rank].float()
    return total.bfloat16()


def train_in_one_process(
    shared: Shared,
    up: torch.Tensor,
    down: torch.Tensor,
    batches: Sequence[Batch],
    owners: Sequence[range],
) -> dict[str, torch.Tensor]:
    """Forward and backward for all ranks' batches.

    Args:
        shared: the part that every rank holds; its gradients are set to their mean over ranks.
        up, down: all experts' matrices, with requires_grad.

    Returns:
        The tensors to compare, by the names that train.Rank.tensors gives them.
    """
    # Rank by rank, because sums over tokens then have the same shape as on the ranks.
    routed = [shared.route(batch) for batch in batches]
    for item in routed:
        item.rows.retain_grad()
        item.topk_weights.retain_grad()
    combined = moe_in_one_process(
        torch.cat([item.rows for item in routed]),
        torch.cat([item.topk_idx for item in routed]),
        torch.cat([item.topk_weights for item in routed]),
        up,
        down,
        owners,
    )
    loss = torch.zeros(())
    parts = torch.split(combined, [len(batch.targets) for batch in batches])
    for item, part, batch in zip(routed, parts, batches, strict=True):
        loss = loss + shared.loss(item, part, batch) + BALANCE * item.balance_loss
    torch.autograd.backward(loss)

    def gradient(*tensors: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor.grad for tensor in tensors if tensor.grad is not None])

    mean = 1 / len(batches)
    return {
        "output of the layer": combined.detach(),
        "gradient of its rows": gradient(*(item.rows for item in routed)),
        "gradient of top-k weights": gradient(*(item.topk_weights for item in routed)),
        "gradient of experts, up": gradient(up) * mean,
        "gradient of experts, down": gradient(down) * mean,
        **{
            f"gradient of {name}": gradient(parameter) * mean
            for name, parameter in shared.named_parameters()
        },
    }
