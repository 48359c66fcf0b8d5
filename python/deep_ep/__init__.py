"""deep_ep: the names of DeepEP V1, for frameworks that import them. Everything is deepep's.

Like deepep, importing it needs no torch, GPU, driver or kernel library. docs/migrating.md says what
differs from V1.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from deepep.version import __version__

if TYPE_CHECKING:
    from deepep.config import Config as Config
    from deepep.events import EventHandle as EventHandle
    from deepep.events import EventOverlap as EventOverlap

    from deep_ep.buffer import Buffer as Buffer

    topk_idx_t: Any

_HOMES = {
    "Buffer": "deep_ep.buffer",
    "Config": "deepep.config",
    "EventHandle": "deepep.events",
    "EventOverlap": "deepep.events",
    "topk_idx_t": "deepep",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(
            f"module 'deep_ep' has no attribute {name!r}; it has V1's {', '.join(sorted(_HOMES))}."
        )
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
