"""What a run of the quickstart is told, and the rules its values must keep."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from deepep.topology import MAX_RANKS_PER_DOMAIN, ROW_ALIGNMENT_BYTES, expert_range

CONTEXT = 8
"""Bytes that a token sees: the current one and those before it."""

TEXT = Path(__file__).parent / "data" / "expert_parallelism.txt"

_STEP = ROW_ALIGNMENT_BYTES // 2  # elements; rows travel in BF16
MAX_TOPK, MAX_LOCAL_EXPERTS = 32, 1024  # DEEPEP_MAX_... of kernels/abi/deepep_kernel.h


@dataclass(frozen=True, slots=True)
class Settings:
    """Values of the flags, which describe them.

    Attributes:
        tokens: of each rank in each step.
        timeout: seconds; for a wait inside dispatch and combine.
        text: a file to learn; None: the one in this package.
    """

    ranks: int = 4
    steps: int = 50
    tokens: int = 256
    hidden: int = 512
    experts: int = 32
    topk: int = 4
    seed: int = 1
    learning_rate: float = 2e-3
    timeout: float = 60.0
    text: str | None = None

    @property
    def text_path(self) -> Path:
        return TEXT if self.text is None else Path(self.text)

    def local_experts(self, rank: int) -> range:
        """The experts that `rank` owns."""
        return expert_range(self.experts, self.ranks, rank)

    def check(self) -> None:
        """Raises ValueError for a value that breaks a rule: what, value, rule, cure."""
        self._check_range("ranks", 1, MAX_RANKS_PER_DOMAIN)
        self._check_range("steps", 2, None, "a falling loss needs two points")
        self._check_range("tokens", 1, None)
        self._check_range("hidden", _STEP, None)
        if self.hidden % _STEP:
            raise ValueError(
                f"--hidden is {self.hidden}, which makes BF16 rows of {2 * self.hidden} bytes, but "
                f"a row must be a multiple of {ROW_ALIGNMENT_BYTES} bytes; use "
                f"--hidden={math.ceil(self.hidden / _STEP) * _STEP}."
            )
        self._check_range(
            "experts", self.ranks, self.ranks * MAX_LOCAL_EXPERTS, f"for {self.ranks} ranks"
        )
        self._check_range("topk", 1, min(MAX_TOPK, self.experts), f"of {self.experts} experts")
        self._check_range("seed", 0, 2**31 - 1)
        for flag in ("learning_rate", "timeout"):
            value = getattr(self, flag)
            if not 0 < value <= 1e9:
                raise ValueError(f"--{flag} is {value}, but must be above 0 and at most 1e9.")
        try:
            length = self.text_path.stat().st_size
        except OSError as error:
            raise ValueError(
                f"--text is {self.text_path}, but it cannot be read: {error.strerror}; name a text "
                "file, or leave the flag out to use the one that comes with the package."
            ) from None
        if length < 2 * CONTEXT:
            raise ValueError(
                f"--text is {self.text_path} with {length} bytes, but there must be at least "
                f"{2 * CONTEXT}; name a longer text."
            )

    def _check_range(self, flag: str, low: int, high: int | None, why: str = "") -> None:
        value = getattr(self, flag)
        if value < low or (high is not None and value > high):
            rule = f"at least {low}" if high is None else f"{low} to {high}"
            cure = low if value < low else high
            because = f" ({why})" if why else ""
            raise ValueError(
                f"--{flag} is {value}, but must be {rule}{because}; use --{flag}={cure}."
            )
