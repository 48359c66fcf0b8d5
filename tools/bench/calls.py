"""The calls that are measured: one Buffer, its inputs, and a function for each operation."""

from __future__ import annotations

from typing import Any

import deepep
import torch
from deepep import fp8, registry

from tools.bench.ranks import Ranks
from tools.bench.shapes import Shape, route
from tools.bench.timing import Call
from tools.bench.traffic import Flow


def new_buffer(ranks: Ranks, shape: Shape, **options: Any) -> tuple[deepep.Buffer, str]:
    """A Buffer for the shape, and which library it has and why. Raises as Calls."""
    name = shape.pinned()
    if name is not None:
        registry.pin(name)
    arch: Any = shape.arch
    try:
        buffer = deepep.Buffer(
            ranks.group,
            device=ranks.device,
            arch=arch,
            hidden=shape.hidden,
            dtype=torch.bfloat16 if shape.dtype == "bf16" else torch.float8_e4m3fn,
            timeout=60,
            **options,
        )
        (reason,) = buffer.chosen_variants()
    finally:
        registry.unpin()
    return buffer, reason


def new_rows(ranks: Ranks, shape: Shape, seed: int) -> torch.Tensor:
    """This rank's tokens: random bfloat16 [tokens, hidden]."""
    generator = torch.Generator(ranks.device).manual_seed(seed + ranks.rank)
    size = (shape.tokens, shape.hidden)
    return torch.randn(size, generator=generator, device=ranks.device).to(torch.bfloat16)


class Calls:
    """A Buffer for one shape, with this rank's tokens; closes with close().

    Raises:
        UnsupportedConfigError: no kernel library fits, the same on all ranks.
        RuntimeError: dispatch followed by combine does not give what it must.
    """

    def __init__(self, ranks: Ranks, shape: Shape, seed: int) -> None:
        self.ranks, self.shape = ranks, shape
        deepep.Buffer.set_num_sms(shape.sms)
        self.buffer, self.reason = new_buffer(ranks, shape)
        rows = new_rows(ranks, shape, seed)
        self.x: Any = rows if shape.dtype == "bf16" else fp8.per_token_cast_to_fp8(rows)
        self.ids = route(shape, ranks.rank, seed).to(ranks.device)
        self.weights = torch.rand(self.ids.shape, device=ranks.device)
        per_rank, _, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(
            self.ids, shape.experts
        )
        self._fresh: dict[str, Any] = {
            "num_tokens_per_rank": per_rank,
            "is_token_in_rank": in_rank,
            "num_tokens_per_expert": per_expert,
            "topk_idx": self.ids,
            "topk_weights": self.weights,
        }
        received, _, _, _, self.handle, _ = self.buffer.dispatch(self.x, **self._fresh)
        data = received[0] if isinstance(received, tuple) else received
        self.pool = self.buffer.empty(*data.shape).copy_(data.to(torch.bfloat16))
        self.any = self.pool.clone()
        self._check()

    @property
    def variant(self) -> str:
        return self.reason.partition(":")[0]

    @property
    def capacity(self) -> int:
        """Rows of a fixed-size output that can never be too small."""
        return self.shape.ranks * self.shape.tokens

    def flow(self) -> Flow:
        """Who sends how much to whom; collective."""
        rows = self._fresh["num_tokens_per_rank"].tolist()
        sent = int(self._fresh["is_token_in_rank"].any(dim=1).sum())
        gathered = self.ranks.gather((rows, sent))
        return Flow([item[0] for item in gathered], [item[1] for item in gathered])

    def call(self, operation: str) -> Call:
        """What is measured under this name."""
        buffer, x, fresh, handle = self.buffer, self.x, self._fresh, self.handle
        ids, experts, capacity = self.ids, self.shape.experts, self.capacity
        pool, other = self.pool, self.any
        calls: dict[str, Call] = {
            "layout": lambda: buffer.get_dispatch_layout(ids, experts),
            "dispatch_cached": lambda: buffer.dispatch(x, handle=handle),
            "dispatch_whole": lambda: buffer.dispatch(x, **fresh),
            "dispatch_worst": lambda: buffer.dispatch(x, num_worst_tokens=capacity, **fresh),
            "combine_pool": lambda: buffer.combine(pool, handle),
            "combine_any": lambda: buffer.combine(other, handle),
        }
        return calls[operation]

    def _check(self) -> None:
        """Sending rows out and adding them up gives each times the ranks it went to, exactly."""
        rows = self.x[0] if isinstance(self.x, tuple) else self.x
        times = self._fresh["is_token_in_rank"].sum(dim=1, keepdim=True)
        want = (rows.float() * times).to(torch.bfloat16)
        for x in (self.pool, self.any):
            got, _, _ = self.buffer.combine(x, self.handle)
            if not torch.equal(got, want):
                raise RuntimeError(
                    f"{self.variant}: {int((got != want).sum())} of {want.numel()} elements are "
                    "wrong after dispatch and combine, so its time means nothing. Run the tests."
                )

    def close(self) -> None:
        self.buffer.destroy()
