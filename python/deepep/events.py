"""EventHandle and EventOverlap: how a caller waits for the communication stream.

On the host architecture operations have finished when they return, so events are complete when
made. torch is imported only inside functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from deepep.errors import BufferStateError

if TYPE_CHECKING:
    import torch


def _cuda_in_use() -> bool:
    """Whether this process has work that an event could wait for; never initialises CUDA."""
    import sys

    if "torch" not in sys.modules:
        return False
    import torch

    cuda: Any = torch.cuda
    return bool(cuda.is_available() and cuda.is_initialized())


class EventHandle:
    """An event on the stream that was current when it was made.

    Args:
        stream: a torch.cuda.Stream to record on instead of the current one.
        tensors: tensors kept alive as long as this handle.

    Where CUDA was never initialised in the process, the event is complete at once.
    """

    def __init__(
        self,
        stream: torch.cuda.Stream | None = None,
        tensors: Iterable[torch.Tensor] = (),
    ) -> None:
        self._tensors = tuple(tensors)
        self._event: Any = None
        if stream is not None or _cuda_in_use():
            import torch

            cuda: Any = torch.cuda
            self._event = cuda.Event()
            self._event.record(stream if stream is not None else cuda.current_stream())

    @property
    def event(self) -> torch.cuda.Event | None:
        """The torch event, or None where it is complete without one."""
        event: torch.cuda.Event | None = self._event
        return event

    def current_stream_wait(self) -> None:
        """Makes the current stream wait for the event; the host does not wait."""
        if self._event is not None:
            import torch

            torch.cuda.current_stream().wait_event(self._event)

    def query(self) -> bool:
        """Whether the event has completed."""
        return self._event is None or bool(self._event.query())

    def synchronize(self) -> None:
        """Blocks the calling thread until the event has completed."""
        if self._event is not None:
            self._event.synchronize()


class EventOverlap:
    """What an operation returns to wait for it; `event` is None unless it was asynchronous.

    As a context manager it waits when the block ends, so that the block overlaps with the
    operation:

        with event:
            independent_work()

    Args:
        event: the handle, or None when the operation has already been waited for.
        extra_tensors: tensors kept alive as long as this object (replaces record_stream, which
            CUDA graphs do not allow).
    """

    def __init__(
        self,
        event: EventHandle | None = None,
        extra_tensors: tuple[torch.Tensor, ...] | None = None,
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self._hook: Callable[[], object] | None = None
        self._release_after_with = False

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Makes the current stream wait, then runs and forgets the registered hook.

        Args:
            release_handle: also drop the event and the tensors it keeps alive.

        Raises:
            BufferStateError: there is no event.
        """
        if self.event is None:
            raise BufferStateError(
                "This EventOverlap holds no event: the operation ran with async_finish=False and "
                "has been waited for already, or the event was released. Remove the wait, or pass "
                "async_finish=True."
            )
        self.event.current_stream_wait()
        hook, self._hook = self._hook, None
        if hook is not None:
            hook()
        if release_handle:
            self.event = None
            self.extra_tensors = None

    def register_hook_after_wait(self, hook: Callable[[], object]) -> None:
        """Runs `hook()` once, right after the next wait.

        Raises:
            BufferStateError: a hook is registered already.
        """
        if self._hook is not None:
            raise BufferStateError(
                "A hook is registered already; there can be one. Combine both in one function."
            )
        self._hook = hook

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """Remembers `release_handle` for the end of a `with` block and returns self."""
        self._release_after_with = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.event is not None:
            self.current_stream_wait(self._release_after_with)
