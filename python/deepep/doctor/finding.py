"""One thing that the doctor found, and the cure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, how it is, and what to do about it.

    Attributes:
        topic: what was looked at, in a word or two.
        level: "problem" keeps deepep, or what was asked for, from running; "warning" costs speed or
            will be met later; "note" is not needed for what was asked for.
        text: how it is, with values.
        remedy: what to do; empty when nothing needs doing.
    """

    topic: str
    level: Level
    text: str
    remedy: str = ""
