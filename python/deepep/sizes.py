"""Exact memory of a dispatch's results, and the largest token count within a budget.

Knows no torch. Python integers have no width, so nothing here overflows; the kernels use 64 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deepep.errors import CapacityError

_MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ReceiveLayout:
    """Bytes of each tensor that a dispatch returns, for `capacity` rows.

    Attributes:
        capacity: rows.
        x, x_scales, topk_idx, topk_weights, src_idx: bytes of each tensor; they never overlap,
            because each is a tensor of its own.
    """

    capacity: int
    x: int
    x_scales: int
    topk_idx: int
    topk_weights: int
    src_idx: int

    @property
    def total(self) -> int:
        """Bytes of all of them."""
        return self.x + self.x_scales + self.topk_idx + self.topk_weights + self.src_idx


def receive_layout(
    capacity: int,
    hidden: int,
    elem_bytes: int,
    num_scales: int,
    num_topk: int,
    index_bytes: int = 8,
) -> ReceiveLayout:
    """Memory of the receive tensors for `capacity` rows.

    Args:
        capacity: rows; sum of all ranks' tokens in the worst case.
        hidden: elements of a row.
        elem_bytes: 2 for BF16, 1 for FP8.
        num_scales: 4-byte scales per row; 0 for BF16.
        num_topk: columns of the top-k tensors; 0 when none travel.
        index_bytes: 8 for int64 ids, 4 for int32.

    Raises:
        ValueError: a negative count, or a hidden size, element or index width out of range.
        CapacityError: more rows than 31-bit row numbers count.
    """
    counts = {"capacity": capacity, "num_scales": num_scales, "num_topk": num_topk}
    for name, value in counts.items():
        if value < 0:
            raise ValueError(f"{name}={value}: must be at least 0.")
    if hidden < 1 or elem_bytes not in (1, 2) or index_bytes not in (4, 8):
        raise ValueError(
            f"hidden={hidden}, elem_bytes={elem_bytes}, index_bytes={index_bytes}: hidden must be "
            "at least 1, elem_bytes 1 or 2, index_bytes 4 or 8."
        )
    if capacity > _MAX_INT32:
        raise CapacityError(
            f"capacity={capacity} rows: row numbers are 32-bit, the largest capacity is "
            f"{_MAX_INT32}. Use fewer tokens per rank."
        )
    return ReceiveLayout(
        capacity=capacity,
        x=capacity * hidden * elem_bytes,
        x_scales=capacity * num_scales * 4,
        topk_idx=capacity * num_topk * index_bytes,
        topk_weights=capacity * num_topk * 4,
        src_idx=capacity * 4,
    )


def worst_case_capacity(num_tokens_per_rank: int, num_ranks: int) -> int:
    """Rows that can arrive when every rank holds at most `num_tokens_per_rank` tokens.

    A token is sent to a rank once, however many of its experts live there, so top-k and the number
    of experts do not matter.
    """
    if num_tokens_per_rank < 0 or num_ranks < 1:
        raise ValueError(
            f"num_tokens_per_rank={num_tokens_per_rank}, num_ranks={num_ranks}: must be at least 0 "
            "and at least 1."
        )
    return num_tokens_per_rank * num_ranks


def largest_tokens_per_rank(
    budget_bytes: int,
    num_ranks: int,
    hidden: int,
    elem_bytes: int,
    num_scales: int,
    num_topk: int,
    index_bytes: int = 8,
) -> int:
    """Most tokens per rank whose worst-case receive tensors fit `budget_bytes`; may be 0."""
    if budget_bytes < 0:
        raise ValueError(f"budget_bytes={budget_bytes}: must be at least 0.")
    row = receive_layout(1, hidden, elem_bytes, num_scales, num_topk, index_bytes).total
    return min(budget_bytes // row, _MAX_INT32) // worst_case_capacity(1, num_ranks)


def free_host_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Memory that the machine can still give, swap left out; 0 where Linux does not tell."""
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return 0
    free = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return 1024 * int(free[0]) if free else 0


def check_budget(
    num_tokens_per_rank: int,
    budget_bytes: int,
    num_ranks: int,
    hidden: int,
    elem_bytes: int,
    num_scales: int,
    num_topk: int,
    index_bytes: int = 8,
) -> ReceiveLayout:
    """The worst-case layout, if it fits `budget_bytes`.

    Raises:
        CapacityError: it does not fit; the text has the bytes needed and the largest legal count.
    """
    capacity = worst_case_capacity(num_tokens_per_rank, num_ranks)
    layout = receive_layout(capacity, hidden, elem_bytes, num_scales, num_topk, index_bytes)
    if layout.total > budget_bytes:
        largest = largest_tokens_per_rank(
            budget_bytes, num_ranks, hidden, elem_bytes, num_scales, num_topk, index_bytes
        )
        raise CapacityError(
            f"num_tokens_per_rank={num_tokens_per_rank} with {num_ranks} ranks needs "
            f"{layout.total} bytes, the budget is {budget_bytes}. The largest count that fits is "
            f"{largest} tokens per rank."
        )
    return layout
