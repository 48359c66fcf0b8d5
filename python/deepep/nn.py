"""ExpertParallel: an MoE layer whose experts are spread over the ranks of a Buffer.

It works eagerly and under torch.compile(fullgraph=True), on any device that the Buffer works on.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import Module

from deepep import ops, permute, topology
from deepep.buffer import Buffer

Router = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Experts = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class ExpertParallel(Module):
    """Sends each token to its experts, runs this rank's experts, and sums the results.

    Args:
        buffer: of the ranks among which experts are spread. The module keeps it alive.
        router: maps [T, H] to topk_idx (int64 or int32 [T, K], -1 for none) and topk_weights
            ([T, K]). A Module becomes part of this one. Every rank holds the same router, and
            averages its gradients over ranks as those of any replicated parameter.
        experts: maps rows [m, H] in the order of experts, and num_rows_per_expert (int64 [El]), to
            [m, H]. Padding rows are zeros at the end of each expert's rows; their results are
            ignored. Where m is fixed, rows beyond the counts are zeros too. A Module becomes part
            of this one; its parameters belong to this rank alone.
        num_experts: E, of the whole group; `local_experts` are this rank's.
        expert_alignment: each expert's rows are padded to a multiple of this.
        num_worst_tokens: if positive, nothing has a size that depends on data, and the host waits
            for no count: as many received rows as can come, at most the tokens of all ranks. m is
            then the largest that can be, num_worst_tokens * K and the padding.

    Forward and backward are collective over the ranks, those without tokens included.

    Raises:
        ValueError: num_experts leaves this rank without an expert.
    """

    def __init__(
        self,
        buffer: Buffer,
        router: Router,
        experts: Experts,
        num_experts: int,
        *,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
    ) -> None:
        super().__init__()
        self.local_experts = topology.expert_range(num_experts, buffer.group_size, buffer.rank)
        if len(self.local_experts) == 0:
            raise ValueError(
                f"num_experts is {num_experts}, but the group has {buffer.group_size} ranks, so "
                f"rank {buffer.rank} has none; make the Buffer on at most num_experts ranks."
            )
        self.router = router
        self.experts = experts
        self.num_experts = num_experts
        self.expert_alignment = expert_alignment
        self.num_worst_tokens = num_worst_tokens
        self.buffer = buffer
        self._name = ops.register(buffer)
        self._num_local = len(self.local_experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """bfloat16 [..., H] to the same shape.

        Each rank's sum over a token's local experts is rounded to BF16 once, and the sum of these
        over ranks once more.

        Raises:
            as Buffer.dispatch and Buffer.combine, in backward as well.
        """
        tokens = x.reshape(-1, x.shape[-1])
        topk_idx, topk_weights = self.router(tokens)
        received = ops.dispatch(
            self._name,
            tokens,
            topk_idx,
            topk_weights.float(),
            self.num_experts,
            num_worst_tokens=self.num_worst_tokens,
        )
        plan = permute.expert_major(
            received.topk_idx, self._num_local, self.expert_alignment, self._places(topk_idx)
        )
        rows = permute.permute(received.x, plan)
        y = self.experts(rows, plan.num_rows_per_expert)
        partial = permute.unpermute(y, received.topk_weights, plan)
        return ops.combine(self._name, partial, received.routing).reshape(x.shape)

    def _places(self, topk_idx: torch.Tensor) -> int:
        """Expert-major rows where they are fixed, else 0."""
        if self.num_worst_tokens == 0:
            return 0
        return permute.max_rows(
            self.num_worst_tokens, topk_idx.shape[1], self._num_local, self.expert_alignment
        )

    def extra_repr(self) -> str:
        return (
            f"num_experts={self.num_experts}, local_experts={self.local_experts}, "
            f"rank={self.buffer.rank}, num_ranks={self.buffer.group_size}"
        )
