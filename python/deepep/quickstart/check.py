"""Gathers one step of all ranks on rank 0 and compares it with the same step in one process."""

from __future__ import annotations

import torch
import torch.distributed as dist

from deepep.quickstart.compare import compare_all
from deepep.quickstart.rank import Rank
from deepep.quickstart.reference import train_in_one_process
from deepep.quickstart.results import Difference


def check(rank: Rank, step: int) -> list[Difference]:
    """Changes no parameter. Collective; rank 0 returns the differences, the others none."""
    mine = _tensors(rank, step)
    rank.optimizer.zero_grad()
    settings = rank.settings
    gathered: list[dict[str, torch.Tensor]] | None = None
    if rank.rank == 0:
        gathered = [{} for _ in range(settings.ranks)]
    dist.gather_object(mine, gathered, group=rank.group)
    if gathered is None:
        return []
    ours = {name: torch.cat([item[name] for item in gathered]) for name in mine}
    ranks = range(settings.ranks)
    reference = train_in_one_process(
        rank.model,
        ours.pop("up").requires_grad_(),
        ours.pop("down").requires_grad_(),
        [rank.batches.of(peer, step) for peer in ranks],
        [settings.local_experts(peer) for peer in ranks],
    )
    rank.optimizer.zero_grad()
    for name in rank.model.replicated():
        # Each rank has averaged this gradient, so there is one copy for each of them to compare.
        key = f"gradient of {name}"
        reference[key] = reference[key].repeat(settings.ranks, 1)
    return compare_all(ours, reference)


def _tensors(rank: Rank, step: int) -> dict[str, torch.Tensor]:
    """This rank's experts, and what train_in_one_process returns, as far as this rank has it."""
    result = rank.gradients(step)
    up, down = rank.model.experts.up, rank.model.experts.down
    found = {
        "output of the layer": result.combined,
        "gradient of its rows": result.rows.grad,
        "gradient of top-k weights": result.topk_weights.grad,
        "gradient of experts, up": up.grad,
        "gradient of experts, down": down.grad,
        **{f"gradient of {name}": p.grad for name, p in rank.model.replicated().items()},
    }
    tensors = {name: tensor for name, tensor in found.items() if tensor is not None}
    return {"up": up.detach(), "down": down.detach(), **tensors}
