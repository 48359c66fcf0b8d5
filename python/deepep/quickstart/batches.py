"""Tokens to learn from: places in a text, each with the bytes before it and the byte after it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepep.quickstart.settings import CONTEXT, Settings


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens: contexts int64 [T, CONTEXT], latest byte first, and targets int64 [T]."""

    contexts: torch.Tensor
    targets: torch.Tensor


class Batches:
    """All ranks' batches of all steps, from the settings alone, so that any rank can make any."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        text = settings.text_path.read_bytes()
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self) -> int:
        """Bytes of the text."""
        return len(self._text)

    def of(self, rank: int, step: int) -> Batch:
        """The tokens of one rank in one step, drawn with repetition from the whole text."""
        config = self._settings
        generator = torch.Generator().manual_seed(
            (config.seed * 1_000_003 + step) * config.ranks + rank
        )
        last = torch.randint(
            CONTEXT - 1, len(self._text) - 1, (config.tokens,), generator=generator
        )
        contexts = self._text[last[:, None] - torch.arange(CONTEXT)]
        return Batch(contexts, self._text[last + 1])
