"""The model: byte embeddings, a sharded MoE layer (deepep.nn.ExpertParallel), and an output layer.

Everything is computed in FP32; rows travel in BF16. Embeddings, router and output layer are the
same on every rank, made from the seed; `Experts` are those of one rank.
"""

from __future__ import annotations

import torch
from torch.nn import Module, Parameter, functional

from deepep.buffer import Buffer
from deepep.nn import ExpertParallel
from deepep.quickstart.batches import Batch
from deepep.quickstart.settings import CONTEXT, Settings

BALANCE = 0.02
"""Weight of the loss that keeps the experts evenly loaded (Switch Transformer's)."""


class Model(Module):
    """One rank's model.

    Args:
        settings: the same on all ranks.
        buffer: of the ranks that the experts are spread over.
    """

    def __init__(self, settings: Settings, buffer: Buffer) -> None:
        super().__init__()
        hidden, generator = settings.hidden, torch.Generator().manual_seed(settings.seed)

        def normal(*shape: int, scale: float) -> Parameter:
            return Parameter(torch.randn(shape, generator=generator) * scale)

        # One table for each distance to the byte that is looked at.
        self.embedding = normal(CONTEXT * 256, hidden, scale=CONTEXT**-0.5)
        self.router = Router(normal(hidden, settings.experts, scale=hidden**-0.5), settings.topk)
        self.output = normal(hidden, 256, scale=hidden**-0.5)
        self.experts = Experts(settings, buffer.rank)
        self.moe = ExpertParallel(buffer, self.router, self.experts, settings.experts)

    def replicated(self) -> dict[str, Parameter]:
        """The parameters that every rank holds, by name."""
        return {
            "embedding": self.embedding,
            "router": self.router.weight,
            "output": self.output,
        }

    def embed(self, batch: Batch) -> torch.Tensor:
        """Looks the bytes up. float32 [T, H]."""
        tables = torch.arange(CONTEXT) * 256
        return functional.embedding_bag(batch.contexts + tables, self.embedding, mode="sum")

    def loss(self, residual: torch.Tensor, combined: torch.Tensor, batch: Batch) -> torch.Tensor:
        """How badly the next byte is predicted, in nats."""
        x = normalise(residual + combined.float())
        return functional.cross_entropy(x @ self.output, batch.targets)


class Router(Module):
    """Sends each token to the best experts of a linear map.

    Attributes, of the latest call:
        topk_idx, topk_weights: int64 and float32 [T, K]; the weights of a token add up to 1, and
            keep their gradient.
        balance_loss: 1 when all experts are equally likely and loaded, more otherwise.
    """

    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    balance_loss: torch.Tensor

    def __init__(self, weight: Parameter, topk: int) -> None:
        super().__init__()
        self.weight, self._topk = weight, topk

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, H] to experts and weights, as ExpertParallel wants them."""
        num_experts = self.weight.shape[1]
        probabilities = (rows.float() @ self.weight).softmax(1)
        chosen, ids = probabilities.topk(self._topk, 1)
        load = torch.bincount(ids.flatten(), minlength=num_experts) / ids.numel()
        self.balance_loss = num_experts * (load * probabilities.mean(0)).sum()
        self.topk_idx, self.topk_weights = ids, chosen / chosen.sum(1, keepdim=True)
        self.topk_weights.retain_grad()
        return self.topk_idx, self.topk_weights


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

    def forward(self, rows: torch.Tensor, num_rows_per_expert: torch.Tensor) -> torch.Tensor:
        """[m, H] in the order of experts to their results, as ExpertParallel wants them."""
        return run_experts(rows, num_rows_per_expert.tolist(), self.up, self.down)


def run_experts(
    rows: torch.Tensor, counts: list[int], up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Each expert's result for its rows.

    Args:
        rows: bfloat16 [m, H], in the order of experts.
        counts: how many of them each expert has; their sum is m.
        up, down: float32 [El, H, I] and [El, I, H].

    Returns:
        bfloat16 [m, H].
    """
    groups = torch.split(rows.float(), counts)
    results = [
        functional.gelu(group @ u) @ d
        for group, u, d in zip(groups, up.unbind(), down.unbind(), strict=True)
    ]
    return torch.cat(results).bfloat16()


def normalise(x: torch.Tensor) -> torch.Tensor:
    """Scales each row to a mean square of 1."""
    return x * (x.square().mean(1, keepdim=True) + 1e-6).rsqrt()
