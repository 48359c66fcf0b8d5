"""EventHandle and EventOverlap on a machine without CUDA work."""

import pytest
import torch
from deepep.errors import BufferStateError
from deepep.events import EventHandle, EventOverlap


def test_host_events_are_complete_when_made() -> None:
    kept = torch.zeros(1)
    handle = EventHandle(tensors=(kept,))
    handle.current_stream_wait()
    handle.synchronize()
    assert handle.query()
    assert torch.cuda.is_initialized() or handle.event is None  # type: ignore[no-untyped-call]


def test_synchronous_operations_have_no_event_to_wait_for() -> None:
    overlap = EventOverlap()
    assert overlap.event is None
    with pytest.raises(BufferStateError, match="async_finish"):
        overlap.current_stream_wait()
    with overlap:
        pass


def test_hook_runs_once_after_the_wait() -> None:
    calls: list[str] = []
    overlap = EventOverlap(EventHandle())
    overlap.register_hook_after_wait(lambda: calls.append("hook"))
    with pytest.raises(BufferStateError, match="registered already"):
        overlap.register_hook_after_wait(lambda: None)
    assert calls == []
    overlap.current_stream_wait()
    overlap.current_stream_wait()
    assert calls == ["hook"]
    overlap.register_hook_after_wait(lambda: calls.append("second"))
    overlap.current_stream_wait()
    assert calls == ["hook", "second"]


def test_release_drops_event_and_tensors() -> None:
    overlap = EventOverlap(EventHandle(), (torch.zeros(1),))
    overlap.current_stream_wait(release_handle=True)
    assert overlap.event is None
    assert overlap.extra_tensors is None


def test_with_block_waits_at_its_end() -> None:
    order: list[str] = []
    overlap = EventOverlap(EventHandle())
    overlap.register_hook_after_wait(lambda: order.append("waited"))
    with overlap as entered:
        assert entered is overlap
        order.append("work")
    assert order == ["work", "waited"]
    assert overlap.event is not None


def test_called_form_releases_at_the_end_of_the_block() -> None:
    overlap = EventOverlap(EventHandle())
    with overlap(release_handle=True) as entered:
        assert entered is overlap
        assert overlap.event is not None
    assert overlap.event is None


def test_errors_inside_the_block_pass_through_after_the_wait() -> None:
    order: list[str] = []
    overlap = EventOverlap(EventHandle())
    overlap.register_hook_after_wait(lambda: order.append("waited"))
    with pytest.raises(KeyError), overlap:
        raise KeyError("mine")
    assert order == ["waited"]
