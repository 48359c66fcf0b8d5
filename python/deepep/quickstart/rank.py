"""One rank of the model: its parameters, and forward, backward and update of a training step.

The part that all ranks hold is data-parallel: its gradients are averaged over the ranks. Experts
are expert-parallel: a rank has the gradients of all tokens for its experts, and of no others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from deepep.quickstart.adam import Adam
from deepep.quickstart.batches import Batches
from deepep.quickstart.clock import Clock, ClockedBuffer
from deepep.quickstart.layer import BALANCE, Experts, Routed, Shared, moe
from deepep.quickstart.settings import Settings


class Pass(NamedTuple):
    """What a forward and backward leaves beside the parameters' gradients.

    Attributes:
        loss: mean over the ranks.
        routed: what was dispatched; rows and weights have their gradients.
        combined: bfloat16 [T, H]; the MoE layer's result.
    """

    loss: float
    routed: Routed
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
        self.rank = int(group.rank())
        self.batches = Batches(settings)
        self.shared = Shared(settings)
        self.experts = Experts(settings, self.rank)
        self.optimizer = Adam(
            [*self.shared.parameters(), *self.experts.parameters()], settings.learning_rate
        )

    def train(self, step: int) -> Pass:
        """Computes gradients and changes the parameters."""
        result = self.gradients(step)
        with self.clock("optimizer"):
            self.optimizer.step()
        return result

    def gradients(self, step: int) -> Pass:
        """Forward and backward; leaves the gradients of the mean loss over ranks."""
        batch = self.batches.of(self.rank, step)
        with self.clock("embeddings and router"):
            routed = self.shared.route(batch)
            routed.rows.retain_grad()
            routed.topk_weights.retain_grad()
        combined = moe(self.buffer, routed, self.experts, self.settings.experts, self.clock)
        with self.clock("output and loss"):
            loss = self.shared.loss(routed, combined, batch)
        with self.clock("backward"):
            torch.autograd.backward(loss + BALANCE * routed.balance_loss)
        with self.clock("all-reduce of gradients"):
            mean_loss = self._average(loss.detach())
        return Pass(mean_loss, routed, combined.detach())

    def _average(self, loss: torch.Tensor) -> float:
        gradients = [p.grad for p in self.shared.parameters() if p.grad is not None]
        flat = torch.cat([loss.view(1), *(gradient.flatten() for gradient in gradients)])
        dist.all_reduce(flat, group=self.group)
        flat /= self.settings.ranks
        start = 1
        for gradient in gradients:
            gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
            start += gradient.numel()
        # An expert's gradient is the sum over the tokens of all ranks already.
        for parameter in self.experts.parameters():
            if parameter.grad is not None:
                parameter.grad /= self.settings.ranks
        return float(flat[0])
