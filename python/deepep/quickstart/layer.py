"""The model: byte embeddings, a router, experts spread over the ranks, and an output layer.

Everything is computed in FP32; rows travel in BF16. `Shared` is held by every rank, `Experts` are
those of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import Module, Parameter, functional

from deepep import autograd
from deepep.buffer import Buffer
from deepep.quickstart.batches import Batch
from deepep.quickstart.clock import Clock
from deepep.quickstart.settings import CONTEXT, Settings

BALANCE = 0.02
"""Weight of the loss that keeps the experts evenly loaded (Switch Transformer's)."""


@dataclass(frozen=True, slots=True)
class Routed:
    """T tokens on their way into the MoE layer.

    Attributes:
        residual: float32 [T, H].
        rows: bfloat16 [T, H]; what is dispatched.
        topk_idx, topk_weights: int64 and float32 [T, K]; the weights of a token add up to 1.
        balance_loss: 1 when all experts are equally likely and loaded, more otherwise.
    """

    residual: torch.Tensor
    rows: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    balance_loss: torch.Tensor


class Shared(Module):
    """Embeddings, router and output layer: the same on every rank, made from the seed."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._settings = settings
        hidden, generator = settings.hidden, torch.Generator().manual_seed(settings.seed)

        def normal(*shape: int, scale: float) -> Parameter:
            return Parameter(torch.randn(shape, generator=generator) * scale)

        # One table for each distance to the byte that is looked at.
        self.embedding = normal(CONTEXT * 256, hidden, scale=CONTEXT**-0.5)
        self.router = normal(hidden, settings.experts, scale=hidden**-0.5)
        self.output = normal(hidden, 256, scale=hidden**-0.5)

    def route(self, batch: Batch) -> Routed:
        """Embeds the bytes and chooses each token's experts."""
        config = self._settings
        tables = torch.arange(CONTEXT) * 256
        residual = functional.embedding_bag(batch.contexts + tables, self.embedding, mode="sum")
        x = normalise(residual)
        probabilities = (x @ self.router).softmax(1)
        chosen, topk_idx = probabilities.topk(config.topk, 1)
        load = torch.bincount(topk_idx.flatten(), minlength=config.experts) / topk_idx.numel()
        return Routed(
            residual=residual,
            rows=x.bfloat16(),
            topk_idx=topk_idx,
            topk_weights=chosen / chosen.sum(1, keepdim=True),
            balance_loss=config.experts * (load * probabilities.mean(0)).sum(),
        )

    def loss(self, routed: Routed, combined: torch.Tensor, batch: Batch) -> torch.Tensor:
        """How badly the next byte is predicted, in nats."""
        x = normalise(routed.residual + combined.float())
        return functional.cross_entropy(x @ self.output, batch.targets)


def normalise(x: torch.Tensor) -> torch.Tensor:
    """Scales each row to a mean square of 1."""
    return x * (x.square().mean(1, keepdim=True) + 1e-6).rsqrt()


def run_experts(
    rows: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """The weighted sum of the given experts' results for each row.

    Args:
        rows: bfloat16 [n, H].
        topk_idx, topk_weights: [n, K]; a row skips ids outside 0..El-1.
        up, down: float32 [El, H, I] and [El, I, H].

    Returns:
        bfloat16 [n, H].
    """
    x = rows.float()
    # Sorts the choices by expert: then each expert's rows are neighbours, in their order.
    row, slot = ((topk_idx >= 0) & (topk_idx < len(up))).nonzero(as_tuple=True)
    expert, order = topk_idx[row, slot].sort(stable=True)
    row, slot = row[order], slot[order]
    counts = torch.bincount(expert, minlength=len(up)).tolist()
    groups = torch.split(x.index_select(0, row), counts)
    results = [
        functional.gelu(group @ u) @ d
        for group, u, d in zip(groups, up.unbind(), down.unbind(), strict=True)
    ]
    weighted = torch.cat(results) * topk_weights[row, slot, None]
    return torch.zeros_like(x).index_add(0, row, weighted).bfloat16()


class Experts(Module):
    """This rank's experts: two matrices each, with a GELU between them."""

    def __init__(self, settings: Settings, rank: int) -> None:
        super().__init__()
        local = settings.local_experts(rank)
        hidden, inner = settings.hidden, settings.hidden // 2
        up, down = torch.empty(len(local), hidden, inner), torch.empty(len(local), inner, hidden)
        for place, expert in enumerate(local):
            # Seeded by expert, so that the model is the same for any number of ranks.
            seed = settings.seed * settings.experts + expert
            generator = torch.Generator().manual_seed(seed)
            up[place].normal_(0, hidden**-0.5, generator=generator)
            down[place].normal_(0, inner**-0.5, generator=generator)
        self.up, self.down = Parameter(up), Parameter(down)


def moe(
    buffer: Buffer, routed: Routed, experts: Experts, num_experts: int, clock: Clock
) -> torch.Tensor:
    """The sharded layer: rows to their experts, experts, results back. bfloat16 [T, H]."""
    received = autograd.dispatch(
        buffer, routed.rows, routed.topk_idx, routed.topk_weights, num_experts
    )
    with clock("experts"):
        y = run_experts(
            received.x, received.topk_idx, received.topk_weights, experts.up, experts.down
        )
    return autograd.combine(buffer, y, received.handle)
