"""What frameworks import from deep_ep.utils: the events."""

from deepep.events import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
