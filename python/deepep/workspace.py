"""The memory of the low-latency mode: every rank's workspace, known to all, and its size.

low_latency_bytes() needs no torch, GPU or library; its numbers are those of
kernels/device/lowlatency/workspace.h, which the kernels use.
"""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any

from deepep import environment
from deepep.errors import STATUS_OK, UnsupportedConfigError
from deepep.fp8 import num_scale_groups

if TYPE_CHECKING:
    import torch

    from deepep.engine import Engine

MAX_TOPK = 32
MAX_EXPERTS = 8192
"""DEEPEP_MAX_LOW_LATENCY_EXPERTS of the ABI: experts of the whole group."""

MAX_ROWS = (1 << 24) - 2
"""DEEPEP_MAX_LOW_LATENCY_ROWS of the ABI: num_ranks times tokens of a rank."""

_ALIGNMENT = 256
_HEAD_CELLS = 6


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def check_shape(max_tokens: int, hidden: int, num_ranks: int, num_experts: int) -> None:
    """Raises ValueError for numbers that no low-latency call can have."""
    for name, value in (("hidden", hidden), ("num_ranks", num_ranks)):
        if value < 1:
            raise ValueError(f"{name} is {value}, but must be at least 1.")
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"num_experts is {num_experts}, but must be 1 to {MAX_EXPERTS}.")
    if not 0 <= max_tokens <= MAX_ROWS // num_ranks:
        raise ValueError(
            f"num_max_dispatch_tokens_per_rank is {max_tokens}, but must be 0 to "
            f"{MAX_ROWS // num_ranks} with {num_ranks} ranks: an expert has room for {MAX_ROWS} "
            "rows."
        )


def cells_bytes(num_ranks: int) -> int:
    """Bytes of the flags, which every workspace holds; direct dispatch and pulls need no more."""
    words = 2 * num_ranks * _HEAD_CELLS + 2 * num_ranks * MAX_EXPERTS + 2 * MAX_EXPERTS
    return _round_up(8 * words, _ALIGNMENT)


def low_latency_bytes(max_tokens: int, hidden: int, num_ranks: int, num_experts: int) -> int:
    """Bytes of a rank's workspace that serves every low-latency call of these shapes.

    Args:
        max_tokens: tokens of any rank, `num_max_dispatch_tokens_per_rank`.
        hidden: elements of a row.
        num_ranks, num_experts: of the whole group.

    Raises:
        ValueError: a number out of range.
    """
    check_shape(max_tokens, hidden, num_ranks, num_experts)
    groups = num_scale_groups(hidden)
    rows = -(-num_experts // num_ranks) * num_ranks * max_tokens
    message = 16 + max(2 * hidden, hidden + _round_up(4 * groups, 16))
    slot = 2 * hidden + _round_up(4 * groups, 16)
    slots = _round_up(max_tokens * min(num_experts, MAX_TOPK) * slot, _ALIGNMENT)
    half = _round_up(max(rows * message, slots), _ALIGNMENT)
    return cells_bytes(num_ranks) + 2 * half


class Workspace:
    """One rank's workspace and what the low-latency mode remembers between calls.

    Args:
        engine: the rank's engine; making a Workspace is collective over its ranks.
        num_bytes: size of each rank's; at least cells_bytes() is taken.
        enable_shrink: ranks may be masked.

    Raises:
        UnsupportedConfigError: the ranks ask for other sizes, or differ in enable_shrink.
        RuntimeError: the memory cannot be had.
    """

    def __init__(self, engine: Engine, num_bytes: int, enable_shrink: bool) -> None:
        import torch

        self.reaches_peers: bool = environment.value("DEEPEP_NVLINK_OPTIMIZE")
        """Rows are written and read where they belong in the peers' memory."""
        self.num_bytes = max(num_bytes, cells_bytes(engine.num_ranks))
        self._memory = engine.workspace_memory(self.num_bytes)
        self._memory[: cells_bytes(engine.num_ranks)].zero_()
        engine.synchronize()
        self.mask: torch.Tensor | None = None
        if enable_shrink:
            self.mask = torch.zeros(engine.num_ranks, dtype=torch.int32, device=engine.device)
        self.known_masked: set[int] = set()
        self.unreceived: dict[str, object] = {}
        """The hook, by kind of operation, of what was sent and not received."""
        self.next_combine: torch.Tensor | None = None
        self._publish(engine, enable_shrink)

    def _publish(self, engine: Engine, enable_shrink: bool) -> None:
        domain = engine.domain
        status, place = domain.await_exported(self._memory.data_ptr(), self.num_bytes)
        if status != STATUS_OK:
            raise engine.fault()
        mine = {"bytes": self.num_bytes, "shrink": enable_shrink, "place": place}
        mine["straight"] = self.reaches_peers
        peers: list[dict[str, Any]] = [
            json.loads(item) for item in engine.comm.all_gather(json.dumps(mine).encode())
        ]
        for key, what in (
            ("bytes", "num_rdma_bytes"),
            ("shrink", "enable_shrink"),
            ("straight", "DEEPEP_NVLINK_OPTIMIZE"),
        ):
            values = [peer[key] for peer in peers]
            if len(set(values)) > 1:
                raise UnsupportedConfigError(
                    f"{what} differs between the ranks: {values}; give all ranks the same."
                )
        domain.set_workspaces([peer["place"] for peer in peers], self.num_bytes)

    def forget(self) -> None:
        """After reset(): nothing is on its way, and hooks of before are void."""
        self.unreceived.clear()
        self.next_combine = None

    def name_masked(self, engine: Engine) -> None:
        """Warns of ranks that did not come. On a GPU that would have to wait: ask for the mask."""
        if self.mask is None or self.mask.device.type != "cpu":
            return
        if new := self._newly_masked():
            warnings.warn(
                f"Ranks {new} did not come within {engine.timeout:g} s and are masked on "
                f"rank {engine.rank}: low-latency operations go on without them.",
                RuntimeWarning,
                stacklevel=3,
            )

    def _newly_masked(self) -> list[int]:
        """Ranks that were masked since the last look."""
        assert self.mask is not None
        masked = set(self.mask.nonzero().flatten().tolist())
        new = sorted(masked - self.known_masked)
        self.known_masked = masked
        return new


def check_size(
    workspace: Workspace, max_tokens: int, hidden: int, num_ranks: int, num_experts: int
) -> None:
    """Raises ValueError when a call that goes through workspaces does not fit this one."""
    need = low_latency_bytes(max_tokens, hidden, num_ranks, num_experts)
    if workspace.num_bytes < need:
        raise ValueError(
            f"The Buffer was made with num_rdma_bytes={workspace.num_bytes}, but receive hooks, "
            "shrinking, LogFMT and expert rows outside exported memory go through workspaces, "
            f"which for these shapes need at least {need}: pass num_rdma_bytes="
            f"Buffer.get_low_latency_rdma_size_hint({max_tokens}, {hidden}, {num_ranks}, "
            f"{num_experts}). Without hooks, and with expert rows from buffer.empty() or under "
            "buffer.memory_pool(), nothing of it is needed."
        )
