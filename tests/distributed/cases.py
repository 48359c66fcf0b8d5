"""The routings that are tested: one list for every architecture, kind of rank and bench.

A Case says who sends what to whom; inputs() makes its tensors, the same in every process. Knows
nothing of Buffers: checks.py runs a case.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from deepep import fp8, topology

DEVICE = torch.device(os.environ.get("DEEPEP_TEST_DEVICE", "cpu"))
"""Where the Buffers under test work; "cpu" is the `host` architecture."""

WORLD_SIZES = (1, 2, 3, 4, 6, 8, 12)
ODD_COUNTS = (1, 3, 31, 33, 127)

Payload = Literal["bf16", "fp8", "fp8_columns", "fp8_ue8m0"]
Tensors = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One dispatch with its combine.

    Attributes:
        name: what is special about it.
        tokens: number of tokens of each rank; its length is the number of ranks.
        routing: a key of ROUTINGS.
        payload: BF16, or FP8 with float32 scales (row- or column-major) or packed UE8M0.
        with_topk: whether ids and weights travel with the rows.
        biases: how many tensors combine adds.
        worst: spare rows of a fixed-size output beyond those received; None: no fixed size.
    """

    name: str
    tokens: tuple[int, ...]
    hidden: int = 512
    num_experts: int = 8
    num_topk: int = 2
    routing: str = "random"
    payload: Payload = "bf16"
    ids: torch.dtype = torch.int64
    with_topk: bool = True
    alignment: int = 1
    biases: int = 0
    worst: int | None = None
    seed: int = 0

    @property
    def num_ranks(self) -> int:
        return len(self.tokens)

    def __str__(self) -> str:
        return f"{self.num_ranks}-{self.name}"


@dataclass(frozen=True)
class Inputs:
    """What one rank passes to dispatch, and the biases that it passes to combine."""

    x: Tensors
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    biases: tuple[torch.Tensor, ...]


# ---- Who goes where: (case, rank, generator) -> ids [tokens, top-k]

Router = Callable[[Case, int, torch.Generator], torch.Tensor]


def _choose(
    case: Case, rank: int, g: torch.Generator, among: list[int] | None = None
) -> torch.Tensor:
    """Distinct experts out of `among`; repeated ones where there are fewer than top-k."""
    allowed = torch.tensor(range(case.num_experts) if among is None else among)
    shape = (case.tokens[rank], case.num_topk)
    if len(allowed) < case.num_topk:
        return allowed[torch.randint(len(allowed), shape, generator=g)]
    order = torch.rand((shape[0], len(allowed)), generator=g).argsort(dim=1)
    return allowed[order[:, : case.num_topk]]


def _with_holes(case: Case, rank: int, g: torch.Generator) -> torch.Tensor:
    ids = _choose(case, rank, g)
    return ids.masked_fill(torch.rand(ids.shape, generator=g) < 0.4, -1)


def _owned_by(owner: Callable[[Case, int], int]) -> Router:
    def choose(case: Case, rank: int, g: torch.Generator) -> torch.Tensor:
        target = owner(case, rank)
        return _choose(
            case, rank, g, [*topology.expert_range(case.num_experts, case.num_ranks, target)]
        )

    return choose


def _nowhere(case: Case, rank: int, g: torch.Generator) -> torch.Tensor:
    return torch.full((case.tokens[rank], case.num_topk), -1)


def _one_expert(case: Case, rank: int, g: torch.Generator) -> torch.Tensor:
    ids = _nowhere(case, rank, g)
    ids[:, -1] = case.num_experts // 2
    return ids


def _silent_first_rank(case: Case, rank: int, g: torch.Generator) -> torch.Tensor:
    return (_nowhere if rank == 0 else _choose)(case, rank, g)


def _cold_experts(case: Case, rank: int, g: torch.Generator) -> torch.Tensor:
    return _choose(case, rank, g, [*range(0, case.num_experts, 3)])


ROUTINGS: dict[str, Router] = {
    "random": _choose,
    "holes": _with_holes,
    "one_rank": _owned_by(lambda case, rank: min(case.num_ranks, case.num_experts) - 1),
    "one_expert": _one_expert,
    "nowhere": _nowhere,
    "silent_first_rank": _silent_first_rank,
    "cold_experts": _cold_experts,
}


def _pack(x: torch.Tensor, payload: Payload) -> Tensors:
    if payload == "bf16":
        return x
    data, scales = fp8.per_token_cast_to_fp8(x, round_scale=payload == "fp8_ue8m0")
    if payload == "fp8_ue8m0":
        return data, fp8.pack_ue8m0(scales)
    return data, scales.t().contiguous().t() if payload == "fp8_columns" else scales


def summands(shape: tuple[int, int], g: torch.Generator) -> torch.Tensor:
    """BF16 whose sum depends on the order: large values cancel, and swallow small ones."""
    small = torch.randn(shape, generator=g)
    large = small.sign() * 2.0**24
    return torch.where(torch.rand(shape, generator=g) < 0.3, large, small).to(torch.bfloat16)


def inputs(case: Case) -> list[Inputs]:
    """Every rank's tensors, on the CPU."""
    made = []
    for rank, tokens in enumerate(case.tokens):
        g = torch.Generator().manual_seed(1000 * case.seed + rank)
        shape = (tokens, case.hidden)
        x = torch.randn(shape, generator=g).to(torch.bfloat16)
        biases = tuple(summands(shape, g) for _ in range(case.biases))
        ids = ROUTINGS[case.routing](case, rank, g).to(case.ids)
        weights = torch.rand(ids.shape, generator=g)
        made.append(Inputs(_pack(x, case.payload), ids, weights, biases))
    return made


# ---- The list


def _odd(num_ranks: int, start: int = 0) -> tuple[int, ...]:
    return tuple(ODD_COUNTS[(rank + start) % len(ODD_COUNTS)] for rank in range(num_ranks))


def cases_of(num_ranks: int) -> list[Case]:
    """Every kind of routing, and every kind of shape, at least once for this many ranks."""
    n = num_ranks
    even, idle = (32,) * n, tuple(0 if rank % 3 == 0 else 5 for rank in range(n))
    long = (33 if n <= 4 else 9,) * n
    few, wide = max(1, n // 2), 4 * n + (n > 1)
    made = [
        Case("plain", even, 512, 8 * n, 4),
        Case("odd_counts", _odd(n), 2880, wide, 3, biases=1),
        Case("holes", even, 24, 4 * n, 8, "holes", ids=torch.int32, alignment=8),
        Case("idle_ranks", idle, 8, 4 * n, 1, biases=2),
        Case("silent_rank", (8,) * n, 2048, 4 * n, 2, "silent_first_rank", alignment=128),
        Case("all_to_one_rank", _odd(n, 1), 512, 3 * n, 2, "one_rank", with_topk=False),
        Case("all_to_one_expert", _odd(n, 2), 7176, 2 * n, 2, "one_expert", biases=1),
        Case("fewer_experts_than_ranks", _odd(n, 3), 64, few, min(2, few), ids=torch.int32),
        Case("top32", (9,) * n, 512, 64, 32, "holes", alignment=8),
        Case("cold_experts", long, 7168, 6 * n, 2, "cold_experts", biases=2),
        Case("one_choice", _odd(n, 4), 2048, n, 1),
        Case("nowhere", (7,) * n, 512, 4 * n, 2, "nowhere", biases=1),
        Case("no_tokens", (0,) * n, 512, 4 * n, 2),
        Case("repeated_experts", (15,) * n, 64, 3, 6),
        Case("fp8", long, 7168, 8 * n, 8, payload="fp8"),
        Case("fp8_column_scales", _odd(n), 2880, wide, 4, payload="fp8_columns", biases=1),
        Case("fp8_packed_scales", idle, 512, 4 * n, 2, payload="fp8_ue8m0", ids=torch.int32),
        Case("fp8_small_rows", (31,) * n, 16, 4 * n, 4, "holes", payload="fp8", with_topk=False),
        Case("fixed_size", _odd(n), 512, 4 * n, 2, "holes", worst=37),
        Case("fixed_size_exact", even, 64, 4 * n, 2, "holes", ids=torch.int32, worst=0),
        Case("fixed_size_fp8", _odd(n, 1), 2880, wide, 4, payload="fp8_columns", worst=5),
        Case("fixed_size_nowhere", (3,) * n, 64, 4 * n, 2, "nowhere", worst=10),
    ]
    return [replace(case, seed=seed + 1) for seed, case in enumerate(made)]


FAULT_CASE = Case("fault", (5, 0, 9, 33), 64, 10, 3, "holes", biases=1)
"""Small and irregular, for tests of what happens around it."""

CASES = [case for n in WORLD_SIZES for case in cases_of(n)]


def random_case(seed: int, num_ranks: int | None = None) -> Case:
    """Any combination of the axes; small rows, so that hundreds take seconds."""
    r = random.Random(seed)
    n = num_ranks or r.choice(WORLD_SIZES)
    payload: Payload = r.choice(("bf16", "bf16", "fp8", "fp8_columns", "fp8_ue8m0"))
    experts = r.choice((1, 2, n, 4 * n, r.randint(1, 8 * n)))
    with_topk = r.random() < 0.8
    return Case(
        name=f"random_{seed}",
        tokens=tuple(r.choice((0, 1, 2, 5, 17, 64)) for _ in range(n)),
        hidden=r.choice((8, 24, 136, 512) if payload == "bf16" else (16, 48, 144, 512)),
        num_experts=experts,
        num_topk=r.choice((1, 2, 5, 8)),
        routing=r.choice([*ROUTINGS]),
        payload=payload,
        ids=r.choice((torch.int32, torch.int64)),
        with_topk=with_topk,
        alignment=r.choice((1, 8, 128)),
        biases=r.randrange(3),
        worst=r.choice((None, None, 0, 9)) if with_topk else None,
        seed=seed,
    )


def find(name: str, num_ranks: int) -> Case:
    """The case of cases_of() with this name."""
    return next(case for case in cases_of(num_ranks) if case.name == name)
