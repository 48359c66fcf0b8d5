"""The second half of a low-latency operation, as the function that its caller gets."""

from __future__ import annotations

from collections.abc import Callable

from deepep.engine import Engine
from deepep.errors import BufferStateError
from deepep.workspace import Workspace

ORDER = "low_latency"
"""Name of the order that dispatches and combines keep over streams, see Engine.begin."""


class ReceiveHook:
    """Receives what was sent, once, on the stream of the sending.

    Args:
        engine, workspace: of the Buffer.
        kind: "dispatch" or "combine"; one of each may be on its way.
        launch: launches the second half.
        keep: what the kernels of the second half read and write. It is let go of when they have
            been launched: results must not live until somebody drops the hook.
    """

    __slots__ = ("_engine", "_keep", "_kind", "_launch", "_stream", "_workspace")

    def __init__(
        self,
        engine: Engine,
        workspace: Workspace,
        kind: str,
        launch: Callable[[], None],
        keep: object,
    ) -> None:
        self._engine, self._workspace, self._kind = engine, workspace, kind
        self._launch: Callable[[], None] | None = launch
        self._keep: object = keep
        self._stream: int = engine.stream
        workspace.unreceived[kind] = self

    def __call__(self) -> None:
        """Receives.

        Raises:
            BufferStateError: it was called before, or reset() came between.
            CommTimeoutError, RankMismatchError: see Buffer.reset().
        """
        self._engine.check_usable()
        launch = self._launch
        if launch is None or self._workspace.unreceived.get(self._kind) is not self:
            raise BufferStateError(
                f"This hook of a low_latency_{self._kind} was called before, or reset() came "
                "between."
            )
        del self._workspace.unreceived[self._kind]
        self._engine.resume(ORDER, self._stream)
        try:
            launch()
        finally:
            self._launch = self._keep = None
        self._workspace.name_masked(self._engine)
