"""The receive hook by itself: once, in its turn, and what it lets go of."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from deepep.errors import BufferStateError
from deepep.hooks import ORDER, ReceiveHook


class Large:
    """Stands for the tensors that a hook keeps."""


class Parts:
    """An engine and a workspace that write down what they are asked."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.engine = cast(
            Any,
            SimpleNamespace(
                stream=7,
                check_usable=lambda: self.told.append("usable"),
                resume=lambda order, stream: self.told.append((order, stream)),
            ),
        )
        self.workspace = cast(
            Any,
            SimpleNamespace(
                unreceived={}, name_masked=lambda engine: self.told.append(engine is self.engine)
            ),
        )

    def hook(self, launch: Callable[[], None], keep: object = None) -> ReceiveHook:
        return ReceiveHook(self.engine, self.workspace, "dispatch", launch, keep)


def test_it_launches_on_the_stream_of_the_sending_and_names_who_was_masked() -> None:
    parts = Parts()
    hook = parts.hook(lambda: parts.told.append("launch"))
    parts.engine.stream = 8  # another call came between
    assert parts.workspace.unreceived == {"dispatch": hook}
    hook()
    assert parts.told == ["usable", (ORDER, 7), "launch", True]
    assert parts.workspace.unreceived == {}


def test_a_second_call_and_one_after_reset_are_refused() -> None:
    parts = Parts()
    hook = parts.hook(lambda: None)
    hook()
    with pytest.raises(BufferStateError, match="low_latency_dispatch was called before, or reset"):
        hook()
    forgotten = parts.hook(lambda: pytest.fail("launched"))
    parts.workspace.unreceived.clear()
    with pytest.raises(BufferStateError, match="reset"):
        forgotten()


@pytest.mark.parametrize("fails", [False, True])
def test_it_keeps_its_tensors_until_it_was_called_and_no_longer(fails: bool) -> None:
    def launch() -> None:
        assert ref() is not None
        if fails:
            raise RuntimeError("no launch")

    parts, large = Parts(), Large()
    ref = weakref.ref(large)
    hook = parts.hook(launch, keep=(large,))
    del large
    assert ref() is not None
    if fails:
        with pytest.raises(RuntimeError, match="no launch"):
            hook()
    else:
        hook()
    assert ref() is None, "the hook, which still exists, keeps what it needs no more"
