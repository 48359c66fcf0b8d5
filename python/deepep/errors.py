"""The exceptions of the package, and the wording of fault records.

Every message says what failed, the value, the rule and the cure. Every class also derives from the
built-in exception a caller would expect, so `except ValueError` or `except TimeoutError` work.
Wrong types and shapes of arguments stay plain TypeError and ValueError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class DeepEPError(Exception):
    """Base of all errors that this package defines."""


class UnsupportedConfigError(DeepEPError, ValueError):
    """No kernel library fits the request; nothing was sent. Build the named variant."""


class KernelLoadError(DeepEPError, ImportError):
    """A kernel library is missing, was changed or does not fit its manifest. Build it again."""


class BufferStateError(DeepEPError, RuntimeError):
    """The object is not in a state that allows the call: destroyed, faulted, another's handle."""


class CapacityError(DeepEPError, ValueError):
    """More rows than the receive tensor, the stated limit, or the memory can hold."""


class KernelError(DeepEPError, RuntimeError):
    """The device runtime reported an error."""


class RankMismatchError(DeepEPError, RuntimeError):
    """A peer called the same operation with other arguments. Make the calls agree, then reset()."""


class CommTimeoutError(DeepEPError, TimeoutError):
    """A peer did not arrive within the timeout. The Buffer refuses calls until reset().

    Attributes:
        operation: "notify", "dispatch" or "combine".
        sequence: which operation of this kind, counting from 1; reset() leaves numbers out.
        rank: the rank that waited.
        missing_ranks: the ranks that did not arrive, ascending.
        phase: what was waited for, in words.
        expected, seen: the flag value that was waited for, and the one found.
    """

    def __init__(
        self,
        message: str = "",
        *,
        operation: str = "",
        sequence: int = 0,
        rank: int = -1,
        missing_ranks: Sequence[int] = (),
        phase: str = "",
        expected: int = 0,
        seen: int = 0,
    ) -> None:
        super().__init__(message)
        self.operation = operation
        self.sequence = sequence
        self.rank = rank
        self.missing_ranks = tuple(missing_ranks)
        self.phase = phase
        self.expected = expected
        self.seen = seen


# Mirrors of the enums in kernels/abi/deepep_kernel.h.
OPERATIONS: Mapping[int, str] = {
    0: "notify",
    1: "dispatch",
    2: "combine",
    3: "low_latency_dispatch",
    4: "low_latency_combine",
}
LOW_LATENCY = (3, 4)
PHASES: Mapping[int, str] = {
    0: "flag",
    1: "token counts",
    2: "tensor addresses",
    3: "closing flag",
    4: "opening of exported memory",
    5: "rows",
    6: "end of an earlier operation",
    7: "beginning of the operation",
}
STATUS_OK, STATUS_INVALID_ARGUMENT, STATUS_TIMEOUT = 0, 1, 2
STATUS_MISMATCH, STATUS_CAPACITY, STATUS_DEVICE_ERROR, STATUS_INTERRUPTED = 3, 4, 5, 6

WITHDRAWN = 2**64 - 1
"""kWithdrawn of kernels/device/intranode/handshake.h: `seen` where a peer took its entry back."""

_INDEX_KINDS = ("none", "int32", "int64", "unknown")
_FAULT_FIELDS = ("code", "op", "phase", "rank", "epoch", "peers", "expected", "seen")


class Signature(NamedTuple):
    """What all ranks must agree on in one dispatch, as the kernels compare it."""

    row_bytes: int
    num_scales: int
    num_topk: int
    index_type: str
    num_experts: int


def decode_signature(packed: int) -> Signature:
    """Unpacks a 64-bit signature: row_bytes:24 num_scales:14 num_topk:6 idx_kind:2 num_experts:18,
    lowest bits first."""
    return Signature(
        row_bytes=packed & 0xFFFFFF,
        num_scales=packed >> 24 & 0x3FFF,
        num_topk=packed >> 38 & 0x3F,
        index_type=_INDEX_KINDS[packed >> 44 & 0x3],
        num_experts=packed >> 46 & 0x3FFFF,
    )


def encode_signature(signature: Signature) -> int:
    """Inverse of decode_signature. Raises ValueError for a field that does not fit its bits."""
    kind = _INDEX_KINDS.index(signature.index_type)
    fields = (
        ("row_bytes", signature.row_bytes, 24),
        ("num_scales", signature.num_scales, 14),
        ("num_topk", signature.num_topk, 6),
        ("index_type", kind, 2),
        ("num_experts", signature.num_experts, 18),
    )
    packed, shift = 0, 0
    for name, value, bits in fields:
        if not 0 <= value < 1 << bits:
            raise ValueError(f"{name}={value} does not fit a signature: 0 <= {name} < {1 << bits}.")
        packed |= value << shift
        shift += bits
    return packed


def ranks_of(mask: int) -> tuple[int, ...]:
    """The ranks whose bits are set in `mask`, ascending."""
    return tuple(rank for rank in range(mask.bit_length()) if mask >> rank & 1)


def _name_ranks(ranks: Sequence[int]) -> str:
    if not ranks:
        return "an unknown rank"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _timeout(place: str, fields: Mapping[str, int], timeout_s: float | None) -> CommTimeoutError:
    missing = ranks_of(fields["peers"])
    phase = PHASES.get(fields["phase"], f"phase {fields['phase']}")
    within = "in time" if timeout_s is None else f"within {timeout_s:g} s"
    if fields["seen"] == WITHDRAWN:
        what = (
            f"{place} came too late: {_name_ranks(missing)} had given up waiting and taken back "
            "its addresses, so nothing was sent to it. Look what kept this rank."
        )
    else:
        what = (
            f"{place} waited for the {phase} by {_name_ranks(missing)}, which did not come "
            f"{within} (expected {fields['expected']}, saw {fields['seen']}). Look whether "
            f"{_name_ranks(missing)} is alive, raised an error, or called another operation."
        )
    return CommTimeoutError(
        f"{what} If it is only slow, raise timeout= of the Buffer or the environment variable "
        "DEEPEP_TIMEOUT (seconds). Afterwards call reset() on all ranks.",
        operation=OPERATIONS.get(fields["op"], f"operation {fields['op']}"),
        sequence=fields["epoch"],
        rank=fields["rank"],
        missing_ranks=missing,
        phase=phase,
        expected=fields["expected"],
        seen=fields["seen"],
    )


def _mismatch(place: str, fields: Mapping[str, int]) -> RankMismatchError:
    if fields["op"] in LOW_LATENCY and PHASES.get(fields["phase"]) == "token counts":
        return RankMismatchError(
            f"{place} met {_name_ranks(ranks_of(fields['peers']))} with other arguments: "
            f"num_max_dispatch_tokens_per_rank is {fields['expected']} here and {fields['seen']} "
            "there. All ranks must pass the same number. Correct the calls, then call reset() on "
            "all ranks."
        )
    mine, theirs = decode_signature(fields["expected"]), decode_signature(fields["seen"])
    peers = _name_ranks(ranks_of(fields["peers"]))
    names = list(Signature._fields)
    if OPERATIONS.get(fields["op"]) == "low_latency_combine":
        names[names.index("num_scales")] = "use_logfmt"
    differences = "; ".join(
        f"{name} is {ours} here and {other} there"
        for name, ours, other in zip(names, mine, theirs, strict=True)
        if ours != other
    )
    return RankMismatchError(
        f"{place} met {peers} with other arguments: {differences or 'no field differs'}. All ranks "
        "must agree on row bytes (hidden size and dtype), scales per row, top-k, index type and "
        "number of experts. Correct the calls, then call reset() on all ranks."
    )


def from_fault(fault: Mapping[str, int] | object, timeout_s: float | None = None) -> DeepEPError:
    """Words a fault record (DeepEpFault) and returns the exception to raise.

    Args:
        fault: a mapping, or an object with attributes, holding code, op, phase, rank, epoch, peers,
            expected and seen. For a mismatch `expected` is this rank's signature and `seen` the
            peer's; for a capacity fault `expected` is the rows held and `seen` the rows arriving.
        timeout_s: seconds that a wait may last, for the text of a timeout.

    Raises:
        ValueError: the record says that nothing is wrong (code 0).
    """
    fields = {
        name: int(fault[name] if isinstance(fault, Mapping) else getattr(fault, name))
        for name in _FAULT_FIELDS
    }
    code = fields["code"]
    operation = OPERATIONS.get(fields["op"], f"operation {fields['op']}")
    place = f"{operation} #{fields['epoch']} on rank {fields['rank']}"
    if code == STATUS_OK:
        raise ValueError("The fault record holds no fault (code 0).")
    if code == STATUS_TIMEOUT:
        return _timeout(place, fields, timeout_s)
    if code == STATUS_MISMATCH:
        return _mismatch(place, fields)
    if code == STATUS_CAPACITY and PHASES.get(fields["phase"]) == PHASES[7]:
        return CapacityError(
            f"{place}: {fields['seen']} tokens of other nodes pass through this rank, which has "
            f"room for notes about {fields['expected']}. Pass num_worst_tokens as large as that "
            "of the ranks of this node that get most rows, or make the Buffer with "
            "max_tokens_per_rank; then call reset() on all ranks."
        )
    if code == STATUS_CAPACITY:
        return CapacityError(
            f"{place}: {fields['seen']} rows arrive, but the receive tensor holds "
            f"{fields['expected']}. Pass num_worst_tokens of at least {fields['seen']} (the sum of "
            "all ranks' tokens is always enough), then call reset() on all ranks."
        )
    if code == STATUS_INTERRUPTED:
        return BufferStateError(
            f"{place} was interrupted by a signal while it waited for "
            f"{_name_ranks(ranks_of(fields['peers']))}, so its ranks are out of step. Call reset() "
            "on all ranks, or make a new Buffer."
        )
    if code == STATUS_INVALID_ARGUMENT:
        return KernelError(
            f"{place}: num_tokens_per_rank says {fields['expected']} tokens for "
            f"{_name_ranks(ranks_of(fields['peers']))}, but is_token_in_rank marks "
            f"{fields['seen']}. Take both from one get_dispatch_layout, then call reset() on all "
            "ranks."
        )
    return KernelError(
        f"{place} met a device error (status {code}). Start a new process: after such an error the "
        "device runtime refuses all work of this one."
    )
