"""MoE layers whose experts are spread over the ranks of a Buffer: ExpertParallel for training and
prefill, ExpertParallelDecode for decoding.

They work eagerly and under torch.compile(fullgraph=True), on any device that the Buffer works on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import Module

from deepep import ops, permute, pipeline, topology
from deepep.buffer import Buffer

Router = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Experts = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
BatchedExperts = Callable[..., torch.Tensor]


def _experts_of_rank(buffer: Buffer, num_experts: int) -> range:
    """This rank's experts. Raises ValueError where it has none."""
    experts = topology.expert_range(num_experts, buffer.group_size, buffer.rank)
    if len(experts) == 0:
        raise ValueError(
            f"num_experts is {num_experts}, but the group has {buffer.group_size} ranks, so "
            f"rank {buffer.rank} has none; make the Buffer on at most num_experts ranks."
        )
    return experts


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
            then the largest that can be, num_worst_tokens * K and the padding. On a GPU, steps with
            their backward can then be captured into a CUDA graph.

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
        self.local_experts = _experts_of_rank(buffer, num_experts)
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
        partial = self._run_experts(received.x, received.topk_idx, received.topk_weights)
        return ops.combine(self._name, partial, received.routing).reshape(x.shape)

    def forward_many(self, batches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """forward() of each batch, bit for bit; rows of one travel while experts work on another.

        Backward overlaps likewise where the gradients of all results are there when it begins. On
        cpu nothing overlaps, since operations finish at once. Eager only. All ranks pass the same
        number of batches; any of them may have no token.

        Args:
            batches: bfloat16 [..., H] each; two are enough to overlap.

        Raises:
            as forward.
        """
        routed = []
        for x in batches:
            tokens = x.reshape(-1, x.shape[-1])
            topk_idx, topk_weights = self.router(tokens)
            routed.append((tokens, topk_idx, topk_weights.float()))
        arriving = [self._begin(*item) for item in routed[:1]]
        leaving = []
        for index in range(len(routed)):
            # Begun before the experts of this batch are launched: it need not wait for them.
            arriving += [self._begin(*item) for item in routed[index + 1 : index + 2]]
            received = pipeline.end_dispatch(arriving[index])
            partial = self._run_experts(received.x, received.topk_idx, received.topk_weights)
            leaving.append(pipeline.begin_combine(self.buffer, partial, received.handle))
        combined = [pipeline.end_combine(begun) for begun in leaving]
        return [out.reshape(x.shape) for out, x in zip(combined, batches, strict=True)]

    def _begin(
        self, tokens: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor
    ) -> pipeline.BegunDispatch:
        return pipeline.begin_dispatch(
            self.buffer, tokens, topk_idx, topk_weights, self.num_experts, self.num_worst_tokens
        )

    def _run_experts(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """Received rows to this rank's sums for them."""
        places = self._places(topk_idx)
        plan = permute.expert_major(topk_idx, self._num_local, self.expert_alignment, places)
        y = self.experts(permute.permute(x, plan), plan.num_rows_per_expert)
        return permute.unpermute(y, topk_weights, plan)

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


class ExpertParallelDecode(Module):
    """ExpertParallel for a step of decoding: few tokens, no size that depends on data, no gradient.

    Args:
        buffer: made with low_latency_mode=True. The module keeps it alive.
        router: as in ExpertParallel.
        experts: maps rows [El, R * M, H] and num_rows_per_expert (int32 [El]) to bfloat16
            [El, R * M, H]; with use_fp8 rows in FP8, their scales (float32 [El, R * M, ns]) and
            num_rows_per_expert. So many first rows of an expert are valid, the others are
            undefined, and so may be their results.
            A Module becomes part of this one; its parameters belong to this rank alone.
        num_experts: E, of the whole group; `local_experts` are this rank's.
        max_tokens: M; no rank may have more tokens. The same on all ranks.
        use_fp8: rows travel in FP8.

    Collective over the ranks, those without tokens included. Experts whose result lies in exported
    memory (Buffer.empty, memory_pool) save a copy. On a GPU, steps can be captured into a CUDA
    graph.

    Raises:
        ValueError: num_experts leaves this rank without an expert.
    """

    def __init__(
        self,
        buffer: Buffer,
        router: Router,
        experts: BatchedExperts,
        num_experts: int,
        max_tokens: int,
        *,
        use_fp8: bool = False,
    ) -> None:
        super().__init__()
        self.local_experts = _experts_of_rank(buffer, num_experts)
        self.router = router
        self.experts = experts
        self.num_experts = num_experts
        self.max_tokens = max_tokens
        self.use_fp8 = use_fp8
        self.buffer = buffer
        self._name = ops.register(buffer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """bfloat16 [..., H] to the same shape: a token's results times weights, rounded once.

        Raises:
            as Buffer.low_latency_dispatch and Buffer.low_latency_combine.
        """
        tokens = x.reshape(-1, x.shape[-1])
        topk_idx, topk_weights = self.router(tokens)
        received = ops.low_latency_dispatch(
            self._name, tokens, topk_idx, self.max_tokens, self.num_experts, use_fp8=self.use_fp8
        )
        rows = (received.x, received.scales) if self.use_fp8 else (received.x,)
        y = self.experts(*rows, received.num_rows_per_expert)
        combined = ops.low_latency_combine(
            self._name, y, topk_idx, topk_weights.float(), received.routing
        )
        return combined.reshape(x.shape)

    def extra_repr(self) -> str:
        return (
            f"num_experts={self.num_experts}, local_experts={self.local_experts}, "
            f"max_tokens={self.max_tokens}, use_fp8={self.use_fp8}, "
            f"rank={self.buffer.rank}, num_ranks={self.buffer.group_size}"
        )
