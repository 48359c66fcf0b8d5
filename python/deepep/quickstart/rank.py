"""One rank of the model: its parameters, and forward, backward and update of a training step.

The part that all ranks hold is data-parallel: its gradients are averaged over the ranks. Experts
are expert-parallel: a rank has the gradients of all tokens for its experts, and of no others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from deepep.quickstart.batches import Batches
from deepep.quickstart.clock import Clock, ClockedBuffer
from deepep.quickstart.model import BALANCE, Model, normalise
from deepep.quickstart.settings import Settings


class Pass(NamedTuple):
    """What a forward and backward leaves beside the parameters' gradients.

    Attributes:
        loss: mean over the ranks.
        rows: bfloat16 [T, H]; what the MoE layer got, with its gradient.
        topk_weights: float32 [T, K]; what its router chose, with its gradient.
        combined: bfloat16 [T, H]; the MoE layer's result.
    """

    loss: float
    rows: torch.Tensor
    topk_weights: torch.Tensor
    combined: torch.Tensor


class Rank:
    """One rank's model and its part of each step; all methods but the constructor are collective.

    Args:
        group: torch process group of all ranks.
        settings: the same on all ranks.
        buffer: of the same group.
        clock: gets the phases of a step.
    """

    def __init__(self, group: Any, settings: Settings, buffer: ClockedBuffer, clock: Clock) -> None:
        self.group, self.settings, self.buffer, self.clock = group, settings, buffer, clock
        self.rank = buffer.rank
        self.batches = Batches(settings)
        self.model = Model(settings, buffer)
        self.optimizer = torch.optim.Adam(
            self.model.parameters(), settings.learning_rate, betas=(0.9, 0.99), fused=True
        )
        clock.follow(self.model.router, "router")
        clock.follow(self.model.experts, "experts")

    def train(self, step: int) -> Pass:
        """Computes gradients and changes the parameters."""
        result = self.gradients(step)
        with self.clock("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()
        return result

    def gradients(self, step: int) -> Pass:
        """Forward and backward; leaves the gradients of the mean loss over ranks."""
        model, batch = self.model, self.batches.of(self.rank, step)
        with self.clock("embeddings"):
            residual = model.embed(batch)
            rows = normalise(residual).bfloat16()
            rows.retain_grad()
        with self.clock("permutation"):  # what is left of the layer without the phases inside
            combined = model.moe(rows)
        with self.clock("output and loss"):
            loss = model.loss(residual, combined, batch)
        with self.clock("backward"):
            torch.autograd.backward(loss + BALANCE * model.router.balance_loss)
        with self.clock("all-reduce of gradients"):
            mean_loss = self._average(loss.detach())
        return Pass(mean_loss, rows, model.router.topk_weights, combined.detach())

    def _average(self, loss: torch.Tensor) -> float:
        gradients = [p.grad for p in self.model.replicated().values() if p.grad is not None]
        flat = torch.cat([loss.view(1), *(gradient.flatten() for gradient in gradients)])
        dist.all_reduce(flat, group=self.group)
        flat /= self.settings.ranks
        start = 1
        for gradient in gradients:
            gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
            start += gradient.numel()
        # An expert's gradient is the sum over the tokens of all ranks already.
        for parameter in self.model.experts.parameters():
            if parameter.grad is not None:
                parameter.grad /= self.settings.ranks
        return float(flat[0])
