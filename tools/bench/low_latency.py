"""The low-latency calls that are measured: a Buffer, its inputs, and functions for operations."""

from __future__ import annotations

from typing import Any

import deepep
import torch
from deepep import fp8

from tools.bench.calls import new_buffer, new_rows
from tools.bench.low_latency_traffic import selections
from tools.bench.ranks import Ranks
from tools.bench.shapes import Shape, route
from tools.bench.timing import Call
from tools.bench.traffic import Flow


class LowLatencyCalls:
    """A low-latency Buffer for one shape, with this rank's tokens; closes with close().

    Raises as Calls.
    """

    def __init__(self, ranks: Ranks, shape: Shape, seed: int) -> None:
        self.ranks, self.shape = ranks, shape
        size = deepep.Buffer.get_low_latency_rdma_size_hint(
            shape.tokens, shape.hidden, shape.ranks, shape.experts
        )
        self.buffer, self.reason = new_buffer(
            ranks, shape, num_rdma_bytes=size, low_latency_mode=True
        )
        self.x = new_rows(ranks, shape, seed)
        self.ids = route(shape, ranks.rank, seed).to(ranks.device)
        # Ones, so that sums are exact; what is measured does not depend on them.
        self.weights = torch.ones(self.ids.shape, device=ranks.device)
        received, _, self.handle, _, _ = self._dispatch()
        rows = received[0] if isinstance(received, tuple) else received
        if isinstance(received, tuple):
            rows = _cast_back(*received)
        self.pool = self.buffer.empty(*rows.shape).copy_(rows)
        self.any = self.pool.clone()
        self._check()

    @property
    def variant(self) -> str:
        return self.reason.partition(":")[0]

    def flow(self) -> Flow:
        """Selections from each rank to each; collective."""
        gathered = self.ranks.gather(selections(self.shape, self.ids))
        return Flow([item[0] for item in gathered], [item[1] for item in gathered])

    def call(self, operation: str) -> Call:
        """What is measured under this name; not for phases."""
        calls: dict[str, Call] = {
            "dispatch": self._dispatch,
            "combine_pool": lambda: self._combine(self.pool),
            "combine_zero_copy": self._combine_zero_copy,
            "combine_any": lambda: self._combine(self.any),
        }
        return calls[operation]

    def steps(self) -> list[tuple[str, Call]]:
        """The phases, in the order in which they must be called."""
        hooks: dict[str, Any] = {}

        def send_dispatch() -> None:
            *hooks["results"], hooks["dispatch"] = self._dispatch(return_recv_hook=True)

        def send_combine() -> None:
            # Along the routing of the first dispatch, which is the same one.
            hooks["sums"], _, hooks["combine"] = self._combine(self.any, return_recv_hook=True)

        return [
            ("dispatch_send", send_dispatch),
            ("dispatch_receive", lambda: hooks["dispatch"]()),
            ("combine_send", send_combine),
            ("combine_receive", lambda: hooks["combine"]()),
        ]

    def _dispatch(self, **options: Any) -> Any:
        use_fp8 = self.shape.dtype == "fp8"
        return self.buffer.low_latency_dispatch(
            self.x, self.ids, self.shape.tokens, self.shape.experts, use_fp8=use_fp8, **options
        )

    def _combine(self, rows: torch.Tensor, **options: Any) -> Any:
        return self.buffer.low_latency_combine(rows, self.ids, self.weights, self.handle, **options)

    def _combine_zero_copy(self) -> Any:
        rows = self.buffer.get_next_low_latency_combine_buffer(self.handle)
        return self._combine(rows, zero_copy=True)

    def _check(self) -> None:
        """Sending rows out and adding them up gives each times its selections, exactly."""
        rows = self.x
        if self.shape.dtype == "fp8":
            rows = fp8.per_token_cast_back(*fp8.per_token_cast_to_fp8(rows))
        want = (rows.float() * (self.ids >= 0).sum(dim=1, keepdim=True)).to(torch.bfloat16)
        mine = self.buffer.get_next_low_latency_combine_buffer(self.handle).copy_(self.pool)
        got = {
            "combine_zero_copy": self._combine(mine, zero_copy=True)[0],
            "combine_pool": self._combine(self.pool)[0],
            "combine_any": self._combine(self.any)[0],
        }
        got["combine_receive"], _, hook = self._combine(self.any, return_recv_hook=True)
        hook()
        for name, sums in got.items():
            if not torch.equal(sums, want):
                raise RuntimeError(
                    f"{self.variant}, {name}: {int((sums != want).sum())} of {want.numel()} "
                    "elements are wrong after dispatch and combine, so its time means nothing. "
                    "Run the tests."
                )

    def close(self) -> None:
        self.buffer.destroy()


def _cast_back(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Expert rows in BF16; those that nobody sent are whatever they are."""
    rows = fp8.per_token_cast_back(data.flatten(0, 1), scales.reshape(-1, scales.shape[2]))
    return rows.to(torch.bfloat16).view(data.shape)
