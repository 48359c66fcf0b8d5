"""Where the time of a step goes: a clock with named phases, and a Buffer that tells it its own."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from deepep.buffer import Buffer


class Clock:
    """Adds up the seconds spent in each phase; a phase inside another one counts only once."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._phase = ""
        self._since = 0.0

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        outer = self._phase
        self._switch(phase)
        try:
            yield
        finally:
            self._switch(outer)

    def follow(self, module: Any, phase: str) -> None:
        """Calls of this torch.nn.Module are a phase from now on."""
        running: list[contextlib.AbstractContextManager[None]] = []

        def begin(*_: Any) -> None:
            running.append(self(phase))
            running[-1].__enter__()

        def end(*_: Any) -> None:
            running.pop().__exit__(None, None, None)

        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end, always_call=True)

    @property
    def phase(self) -> str:
        """The innermost phase that is running; empty outside all of them."""
        return self._phase

    def _switch(self, phase: str) -> None:
        now = time.perf_counter()
        if self._phase:
            self.seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now


class ClockedBuffer(Buffer):
    """A Buffer whose operations are phases of a clock, and which counts the rows it sends.

    Attributes:
        rows_sent: to each rank, by the latest dispatch that got a new layout.
        expert_load: rows of each of this rank's experts that it brought.
    """

    def __init__(self, clock: Clock, group: Any, **options: Any) -> None:
        super().__init__(group, **options)
        self._clock = clock
        self.rows_sent: list[int] = []
        self.expert_load: list[int] = []

    def _named(self, forward: str, backward: str) -> contextlib.AbstractContextManager[None]:
        return self._clock(backward if self._clock.phase == "backward" else forward)

    def get_dispatch_layout(self, *args: Any, **kwargs: Any) -> Any:
        with self._clock("layout"):
            result = super().get_dispatch_layout(*args, **kwargs)
        self.rows_sent = result[0].tolist()
        return result

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        with self._named("dispatch", "gradient of combine"):
            result = super().dispatch(*args, **kwargs)
        if result[3] is not None:
            self.expert_load = result[3]
        return result

    def combine(self, *args: Any, **kwargs: Any) -> Any:
        with self._named("combine", "gradient of dispatch"):
            return super().combine(*args, **kwargs)
