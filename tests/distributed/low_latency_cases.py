"""Cases of the low-latency mode, and the check of one round: every byte against the definition."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from deepep import Buffer, fp8
from deepep import low_latency_reference as reference
from deepep.low_latency import LowLatencyDispatched

POISON = 0x5A
"""Byte that receive tensors and expert rows are filled with where nothing belongs."""


@dataclass(frozen=True)
class Shape:
    """One round: T tokens at most on each rank, M of the call."""

    tokens: int
    max_tokens: int
    hidden: int
    topk: int
    experts: int
    cast: str = "fp8"  # bf16, fp8, rounded, ue8m0, given
    hook: bool = False
    rows: str = "foreign"  # where the expert rows lie: foreign, exported, zero_copy
    logfmt: bool = False
    index: torch.dtype = torch.int64

    @property
    def name(self) -> str:
        parts = [f"h{self.hidden}", f"t{self.tokens}of{self.max_tokens}"]
        parts += [f"k{self.topk}e{self.experts}", self.cast, self.rows]
        return "-".join(parts + ["hook"] * self.hook + ["logfmt"] * self.logfmt)

    def but(self, **changes: Any) -> Shape:
        return replace(self, **changes)


@dataclass(frozen=True)
class Tokens:
    """What one rank holds in one round; every rank can tell what the others hold."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


def tokens_of(shape: Shape, rank: int, seed: int) -> Tokens:
    """Random rows, distinct experts, some selections and some whole tokens without an expert."""
    random = torch.Generator().manual_seed(seed * 1009 + rank)
    count = shape.tokens
    if seed % 4 == 1:  # idle and half-idle ranks
        count = count * (rank % 3) // 2
    x = torch.randn((count, shape.hidden), generator=random).bfloat16()
    ids = torch.full((count, shape.topk), -1)
    for token in range(count):
        ids[token] = torch.randperm(shape.experts, generator=random)[: shape.topk]
    if seed % 4 == 2:
        ids[torch.rand(ids.shape, generator=random) < 0.3] = -1
        ids[: count // 4] = -1
    if seed % 4 == 3:  # everybody to the first experts
        ids[:] = torch.arange(shape.topk)
    weights = torch.rand((count, shape.topk), generator=random)
    return Tokens(x, ids.to(shape.index), weights)


BASE = Shape(tokens=9, max_tokens=12, hidden=272, topk=3, experts=10)

MODES = [
    BASE,
    BASE.but(cast="bf16"),
    BASE.but(cast="rounded"),
    BASE.but(cast="ue8m0"),
    BASE.but(cast="given"),
    BASE.but(rows="exported"),
    BASE.but(rows="zero_copy"),
    BASE.but(hook=True),
    BASE.but(hook=True, cast="bf16"),
    BASE.but(hook=True, cast="ue8m0"),
    BASE.but(hook=True, cast="given", rows="exported"),
    BASE.but(hook=True, rows="zero_copy"),
    BASE.but(logfmt=True),
    BASE.but(logfmt=True, hook=True, hidden=2880),
]

SHAPES = [
    BASE.but(tokens=1, max_tokens=1),
    BASE.but(tokens=0, max_tokens=0),
    BASE.but(tokens=40, max_tokens=64, topk=8, experts=64),
    BASE.but(hidden=16, cast="fp8"),
    BASE.but(hidden=8, cast="bf16", rows="exported"),
    BASE.but(hidden=2880),
    BASE.but(hidden=2880, cast="ue8m0", hook=True),
    BASE.but(hidden=7168, tokens=3, max_tokens=4),
    BASE.but(topk=32, experts=33, tokens=5),
    BASE.but(topk=1, experts=1),
    BASE.but(topk=2, experts=3, hook=True),
    BASE.but(topk=16, experts=896, tokens=4),
]


def on(buffer: Buffer, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the Buffer's device."""
    return tensor.to(buffer._engine.device)


def cast_of(x: torch.Tensor, cast: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The rows and scales as they are received."""
    if cast == "bf16":
        return x, None
    data, scales = fp8.per_token_cast_to_fp8(x, round_scale=cast in ("rounded", "ue8m0"))
    return data, fp8.pack_ue8m0(scales) if cast == "ue8m0" else scales


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, so that equal means equal."""
    return tensor.contiguous().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def send(buffer: Buffer, shape: Shape, mine: Tokens, **stats: Any) -> LowLatencyDispatched:
    """The dispatch of one round; with a hook it is only sent."""
    x: Any = on(buffer, mine.x)
    if shape.cast == "given":
        data, scales = cast_of(mine.x, "fp8")
        assert scales is not None
        x = (on(buffer, data), on(buffer, scales))
    return buffer.low_latency_dispatch(
        x,
        on(buffer, mine.ids),
        shape.max_tokens,
        shape.experts,
        use_fp8=shape.cast != "bf16",
        round_scale=shape.cast in ("rounded", "ue8m0"),
        use_ue8m0=shape.cast == "ue8m0",
        return_recv_hook=shape.hook,
        **stats,
    )


def check_received(
    shape: Shape, rank: int, held: list[Tokens], result: LowLatencyDispatched
) -> list[reference.ExpertRows]:
    """Rows, scales, sources and counts of a finished dispatch."""
    payload, count, handle, _, _ = result
    device_x, device_scales = payload if isinstance(payload, tuple) else (payload, None)
    x, scales = device_x.cpu(), None if device_scales is None else device_scales.cpu()
    cast = [cast_of(tokens.x, shape.cast) for tokens in held]
    ids = [tokens.ids for tokens in held]
    expected = reference.dispatch([rows for rows, _ in cast], ids, shape.experts)
    mine = expected[rank]
    num_local, num_rows = len(mine.rows), len(held) * shape.max_tokens
    assert tuple(x.shape) == (num_local, num_rows, shape.hidden)
    assert count.tolist() == mine.counts
    src_info, layout_range, max_tokens, hidden, experts = handle
    assert (max_tokens, hidden, experts) == (shape.max_tokens, shape.hidden, shape.experts)
    assert torch.equal(layout_range.cpu(), mine.layout_range)
    for e, rows in enumerate(mine.rows):
        assert torch.equal(bits(x[e, : len(rows)]), bits(rows)), f"rows of expert {e}"
        assert src_info[e, : len(rows)].tolist() == [token for _, token, _ in mine.sources[e]]
    if scales is not None:
        sent = [scale for _, scale in cast if scale is not None]
        for e, rows in enumerate(reference.dispatch(sent, ids, shape.experts)[rank].rows):
            assert torch.equal(bits(scales[e, : len(rows)]), bits(rows)), f"scales of expert {e}"
        assert device_scales is not None
        assert device_scales.stride(1) == 1 or num_rows <= 1, "rows are the fastest dimension"
        assert scales.shape[:2] == (num_local, num_rows)
    return expected


def expert_outputs(shape: Shape, expected: list[reference.ExpertRows]) -> list[list[torch.Tensor]]:
    """What the experts of every rank make of their rows: any function of rank, expert and row."""
    outputs = []
    for rank, there in enumerate(expected):
        rows = []
        for e, sources in enumerate(there.sources):
            factors = [(s * 37 + t * 5 + k + e * 3 + rank) % 29 - 14 for s, t, k in sources]
            column = torch.tensor(factors, dtype=torch.float32).view(-1, 1)
            rows.append((column + torch.arange(shape.hidden) % 13 / 8).bfloat16())
        outputs.append(rows)
    return outputs


def place_rows(
    buffer: Buffer, shape: Shape, rows: list[torch.Tensor], result: LowLatencyDispatched
) -> torch.Tensor:
    """The expert rows in the tensor that combine takes, poison where there is no row."""
    handle = result[2]
    full = (len(rows), buffer.group_size * shape.max_tokens, shape.hidden)
    if shape.rows == "zero_copy":
        x = buffer.get_next_low_latency_combine_buffer(handle)
        assert tuple(x.shape) == full
    elif shape.rows == "exported":
        x = buffer.empty(*full)
    else:
        x = on(buffer, torch.empty(full, dtype=torch.bfloat16))
    x.view(torch.uint8).fill_(POISON)
    for e, part in enumerate(rows):
        x[e, : len(part)] = on(buffer, part)
    return x


def check_round(buffer: Buffer, shape: Shape, seed: int) -> None:
    """One dispatch and one combine, compared with the definition on every rank."""
    rank = buffer.rank
    held = [tokens_of(shape, source, seed) for source in range(buffer.group_size)]
    result = send(buffer, shape, held[rank])
    if result[4] is not None:
        result[4]()
    expected = check_received(shape, rank, held, result)
    outputs = expert_outputs(shape, expected)
    x = place_rows(buffer, shape, outputs[rank], result)
    combined, _, hook = buffer.low_latency_combine(
        x,
        on(buffer, held[rank].ids),
        on(buffer, held[rank].weights),
        result[2],
        use_logfmt=shape.logfmt,
        zero_copy=shape.rows == "zero_copy",
        return_recv_hook=shape.hook,
    )
    if hook is not None:
        if shape.rows != "zero_copy":
            x.view(torch.uint8).fill_(POISON)  # sent: the caller may use it again
        hook()
    weights = [tokens.weights for tokens in held]
    wanted = reference.combine(outputs, expected, weights, shape.hidden)[rank]
    if shape.logfmt:
        torch.testing.assert_close(combined.cpu(), wanted, rtol=0.05, atol=0.05)
    else:
        assert torch.equal(combined.cpu(), wanted)
