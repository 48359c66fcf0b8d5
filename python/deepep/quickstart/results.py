"""What ranks report to the process that started them. Imports no torch, which takes seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

# Both computations round to BF16 at the same places and multiply matrices of the same shape. Only
# some FP32 numbers are added in another order. This makes differences of about 1e-7, and seldom one
# of a whole step of BF16, where such a sum lies on the edge between two BF16 numbers.

LARGEST_ALLOWED = 2.0**-7
"""For any element, relative to the largest: a step between BF16 numbers. A lost row makes more."""

RMS_ALLOWED = 2.0**-12
"""For the root mean square, relative to that of the tensor: room for a few steps in a thousand
elements. One rounding too many, or in another place, makes 1e-3."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How far one tensor is from its reference; NaN where there is any NaN.

    Attributes:
        name: what was compared.
        elements: how many.
        largest: largest difference of an element, divided by the reference's largest magnitude.
        rms: root mean square of the differences, divided by that of the reference.
    """

    name: str
    elements: int
    largest: float
    rms: float

    @property
    def rms_allowed(self) -> float:
        """RMS_ALLOWED, and in a small tensor one step of one element, four times the mean one."""
        return RMS_ALLOWED + 4 * LARGEST_ALLOWED / math.sqrt(max(1, self.elements))

    @property
    def ok(self) -> bool:
        return self.largest <= LARGEST_ALLOWED and self.rms <= self.rms_allowed  # False for NaN


@dataclass(slots=True)
class Result:
    """What one rank reports.

    Attributes:
        losses: of each step, the mean over all ranks.
        variants: chosen kernel libraries, with reasons.
        rows_sent: to each rank, by the dispatch of the last step.
        expert_load: rows of each of this rank's experts, in the last step.
        seconds: in each phase, the mean over all steps but the first.
        before, after: comparisons before and after training; only rank 0 has them.
    """

    losses: list[float] = field(default_factory=list)
    variants: list[str] = field(default_factory=list)
    rows_sent: list[int] = field(default_factory=list)
    expert_load: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    before: list[Difference] = field(default_factory=list)
    after: list[Difference] = field(default_factory=list)


def final_loss(losses: list[float]) -> float:
    """Mean of the last quarter of the steps: one batch alone may be a hard one."""
    tail = losses[-max(1, len(losses) // 4) :]
    return sum(tail) / len(tail)


def failures(results: list[Result]) -> list[str]:
    """What is wrong with a run, in words; empty if nothing is."""
    found = []
    for when, differences in (("before", results[0].before), ("after", results[0].after)):
        if not differences:
            found.append(f"Nothing was compared {when} training.")
        found += [
            f"{difference.name} {when} training differs from the computation in one process: "
            f"largest {difference.largest:.1e} (allowed {LARGEST_ALLOWED:.1e}), rms "
            f"{difference.rms:.1e} (allowed {difference.rms_allowed:.1e})."
            for difference in differences
            if not difference.ok
        ]
    losses = results[0].losses
    if not final_loss(losses) < losses[0]:  # as well true for NaN
        found.append(
            f"The loss did not fall: {losses[0]:.3f} in the first step, {final_loss(losses):.3f} "
            "in the last ones. With other flags than the defaults, try a lower --learning_rate or "
            "more --steps."
        )
    return found
