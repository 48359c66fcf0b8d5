"""deepep: dispatch and combine for expert-parallel Mixture-of-Experts models.

Importing it needs no torch, GPU, driver or kernel library: names are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from deepep.version import __version__

if TYPE_CHECKING:
    from deepep.buffer import Buffer as Buffer
    from deepep.config import Config as Config
    from deepep.errors import BufferStateError as BufferStateError
    from deepep.errors import CapacityError as CapacityError
    from deepep.errors import CommTimeoutError as CommTimeoutError
    from deepep.errors import DeepEPError as DeepEPError
    from deepep.errors import KernelError as KernelError
    from deepep.errors import KernelLoadError as KernelLoadError
    from deepep.errors import RankMismatchError as RankMismatchError
    from deepep.errors import UnsupportedConfigError as UnsupportedConfigError
    from deepep.events import EventHandle as EventHandle
    from deepep.events import EventOverlap as EventOverlap
    from deepep.handles import DispatchHandle as DispatchHandle
    from deepep.registry import pin as pin
    from deepep.registry import unpin as unpin
    from deepep.registry import variants as variants

    topk_idx_t: Any

_HOMES = {
    "Buffer": "buffer",
    "BufferStateError": "errors",
    "CapacityError": "errors",
    "CommTimeoutError": "errors",
    "Config": "config",
    "DeepEPError": "errors",
    "DispatchHandle": "handles",
    "EventHandle": "events",
    "EventOverlap": "events",
    "KernelError": "errors",
    "KernelLoadError": "errors",
    "RankMismatchError": "errors",
    "UnsupportedConfigError": "errors",
    "pin": "registry",
    "unpin": "registry",
    "variants": "registry",
}

__all__ = ["__version__", "topk_idx_t", *_HOMES]


def __getattr__(name: str) -> Any:
    if name == "topk_idx_t":
        import torch

        # V1's default index type; int32 is accepted as well.
        return torch.int64
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'deepep' has no attribute {name!r}")
    value = getattr(import_module(f"deepep.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
