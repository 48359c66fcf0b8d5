"""What is measured: shapes, their sweep, and routings of different skew. Knows no Buffer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

OPERATIONS = {
    "layout": "get_dispatch_layout",
    "dispatch_cached": "dispatch with a handle",
    "dispatch_whole": "dispatch without one: exchange of counts and the host's wait included",
    "dispatch_worst": "dispatch with num_worst_tokens: no wait of the host",
    "combine_pool": "combine of a tensor of the Buffer's memory",
    "combine_any": "combine of any other tensor",
}
LOW_LATENCY = {
    "dispatch": "low_latency_dispatch, whole",
    "combine_pool": "low_latency_combine, whole, of rows in the Buffer's memory",
    "combine_zero_copy": "the same of rows in the next combine buffer, which is asked for as well",
    "combine_any": "the same of any other tensor, whose rows are sent",
    "dispatch_send": "low_latency_dispatch with a hook",
    "dispatch_receive": "its hook, everybody having sent",
    "combine_send": "low_latency_combine of any tensor, with a hook",
    "combine_receive": "its hook, everybody having sent",
}
PHASES = ("dispatch_send", "dispatch_receive", "combine_send", "combine_receive")
MODES = {"normal": OPERATIONS, "low_latency": LOW_LATENCY}
DTYPES = ("bf16", "fp8")
SKEWS = ("uniform", "zipf", "hot")
VARIANTS = ("best", "generic")
MAX_TOPK = 32
SCALE_GROUP = 128  # elements that share an FP8 scale


@dataclass(frozen=True)
class Shape:
    """One point of a sweep. Every rank has `tokens` tokens.

    Attributes:
        skew: uniform: all experts alike; zipf: expert i is chosen in proportion to 1 / (i + 1),
            in an order that scatters the popular ones over the ranks; hot: only experts of rank 0.
        variant: best: what the registry chooses; generic: any hidden size, any number of ranks.
        arch: sm80, sm90 or host.
        mode: normal or low_latency. In the latter FP8 rows are cast by dispatch, and sms has no
            meaning: its kernels take all that a rank may have.
    """

    ranks: int = 8
    tokens: int = 4096
    hidden: int = 7168
    topk: int = 8
    experts: int = 256
    dtype: str = "bf16"
    skew: str = "uniform"
    sms: int = 16
    arch: str = "sm90"
    variant: str = "best"
    mode: str = "normal"

    def check(self) -> None:
        """Raises ValueError: what, value, rule, cure."""
        for name, allowed in (("dtype", DTYPES), ("skew", SKEWS), ("variant", VARIANTS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)}: must be one of {allowed}.")
        for name in ("ranks", "tokens", "hidden", "topk", "experts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1.")
        if self.topk > min(self.experts, MAX_TOPK):
            raise ValueError(
                f"topk={self.topk} with experts={self.experts}: a token chooses distinct experts, "
                f"at most {MAX_TOPK}. Pass a smaller --topk or more --experts."
            )
        if self.payload_bytes % 16:
            raise ValueError(
                f"hidden={self.hidden} in {self.dtype} makes rows of {self.payload_bytes} bytes; "
                "they must be a multiple of 16. Pass another --hidden."
            )
        if self.sms < 2 or self.sms % 2:
            raise ValueError(f"sms={self.sms}: must be even and at least 2, as in DeepEP.")

    @property
    def payload_bytes(self) -> int:
        """Bytes of a row in dispatch, without scales."""
        return self.hidden * (2 if self.dtype == "bf16" else 1)

    @property
    def scale_bytes(self) -> int:
        return 0 if self.dtype == "bf16" else 4 * -(-self.hidden // SCALE_GROUP)

    @property
    def operations(self) -> tuple[str, ...]:
        """Combine is always in BF16, so it is measured with one payload only."""
        usual = "bf16" if self.mode == "normal" else "fp8"
        return tuple(
            name
            for name in MODES[self.mode]
            if self.dtype == usual or not name.startswith("combine")
        )

    def pinned(self) -> str | None:
        """Name of the variant to limit the registry to; None: no limit."""
        if self.variant == "best":
            return None
        topology = "intranode" if self.mode == "normal" else "lowlatency"
        return f"{topology}_{self.arch}_hany_{self.dtype}_rany"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def sweep(base: Shape, axes: dict[str, Sequence[Any]]) -> list[Shape]:
    """Every combination of the axes, checked; ranks vary slowest, since they cost new processes.

    Where the number of SMs has no meaning only the first one counts.
    """
    axes = {"ranks": axes.get("ranks", [base.ranks]), **axes}
    shapes: dict[Shape, None] = {}
    for values in itertools.product(*axes.values()):
        shape = replace(base, **dict(zip(axes, values, strict=True)))
        shape.check()
        if shape.arch == "host" or shape.mode == "low_latency":
            shape = replace(shape, sms=axes.get("sms", [base.sms])[0])
        shapes.setdefault(shape)
    return list(shapes)


def route(shape: Shape, rank: int, seed: int = 0) -> torch.Tensor:
    """Experts of each of the rank's tokens: int64 [tokens, topk], distinct; -1 for none left."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    popularity = torch.zeros(shape.experts)  # logarithms
    if shape.skew == "zipf":
        order = torch.randperm(shape.experts, generator=torch.Generator().manual_seed(seed))
        popularity[order] = -torch.arange(1, shape.experts + 1).log()
    elif shape.skew == "hot":
        first = -(-shape.experts // shape.ranks)
        popularity[first:] = -torch.inf
    # The largest of log(p) + Gumbel noise: sampling in proportion to p without replacement.
    uniform = torch.rand((shape.tokens, shape.experts), generator=generator)
    noise = -(-uniform.clamp(1e-20, 1 - 1e-7).log()).log()
    scores, ids = (popularity + noise).topk(shape.topk, dim=1)
    return ids.masked_fill(scores.isneginf(), -1)
