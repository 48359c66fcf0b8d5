"""What every mode of Buffer shares: the engine, the rank, the limits."""

from __future__ import annotations

from typing import ClassVar

from deepep.engine import Engine


class BufferPart:
    """Base of the modes that Buffer is put together from."""

    num_sms: ClassVar[int] = 20
    rank: int
    group_size: int
    max_tokens_per_rank: int | None
    _engine: Engine
    _id: int
