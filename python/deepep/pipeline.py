"""Differentiable dispatch and combine in two halves each: begun now, waited for later.

    begun = begin_dispatch(buffer, x, topk_idx, topk_weights, num_experts, 0)
    other_work()  # on a GPU it overlaps with the rows' way
    rows, ids, weights, handle = end_dispatch(begun)

Backward has the halves the other way round: the gradient of the second half begins the return of
rows, and that of the first waits for it; what autograd runs between the two overlaps. The first
takes its result from the common state, since a gradient must have the shape of what it belongs to.

On cpu an operation has finished when it was begun. Letters as in deepep.buffer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from deepep.autograd import dispatch_rows
from deepep.buffer import Buffer
from deepep.events import EventOverlap
from deepep.internode_handle import AnyHandle


class _Flight:
    """One operation between its halves, and later its gradient."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.handle: AnyHandle | None = None
        self.event = EventOverlap()
        self.gradients: tuple[torch.Tensor | None, ...] = ()

    def wait(self) -> None:
        if self.event.event is not None:
            self.event.current_stream_wait()

    def landed(self) -> tuple[torch.Tensor | None, ...]:
        """The gradients, waited for."""
        self.wait()
        gradients, self.gradients = self.gradients, ()
        return gradients


class _BeginDispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        flight: _Flight,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        num_experts: int,
        num_worst_tokens: int,
    ) -> tuple[Any, ...]:
        received, flight.event = dispatch_rows(
            flight.buffer,
            x,
            topk_idx,
            topk_weights,
            num_experts,
            1,
            num_worst_tokens,
            async_finish=True,
        )
        flight.handle = received.handle
        ctx.flight = flight
        ctx.mark_non_differentiable(received.topk_idx)
        return received.x, received.topk_idx, received.topk_weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Any) -> tuple[Any, ...]:
        grad, grad_weights = ctx.flight.landed()
        return None, grad, None, grad_weights, None, None


class _EndDispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, flight: _Flight, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        flight.wait()
        ctx.flight = flight
        ctx.save_for_backward(ids)
        return x.view_as(x), weights.view_as(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x: torch.Tensor, grad_weights: torch.Tensor) -> tuple[Any, ...]:
        (ids,), flight = ctx.saved_tensors, ctx.flight
        # A weight of another rank's expert arrived as a constant 0, whatever was computed with it.
        own_weights = grad_weights.masked_fill(ids < 0, 0.0)
        grad, grad_topk, flight.event = flight.buffer.combine(
            grad_x.contiguous(), flight.handle, topk_weights=own_weights, async_finish=True
        )
        flight.gradients = (grad, grad_topk)
        return None, grad_x, None, grad_weights


class _BeginCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flight: _Flight, x: torch.Tensor) -> torch.Tensor:
        ctx.flight = flight
        assert flight.handle is not None
        combined, _, flight.event = flight.buffer.combine(
            x.contiguous(), flight.handle, async_finish=True
        )
        return combined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor) -> tuple[Any, ...]:
        (rows,) = ctx.flight.landed()
        return None, rows


class _EndCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flight: _Flight, combined: torch.Tensor) -> torch.Tensor:
        flight.wait()
        ctx.flight = flight
        return combined.view_as(combined)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        flight = ctx.flight
        rows, *_, flight.event = flight.buffer.dispatch(
            grad.contiguous(), handle=flight.handle, async_finish=True
        )
        flight.gradients = (rows,)
        return None, grad


class BegunDispatch(NamedTuple):
    """For end_dispatch; its tensors are not to be read."""

    flight: _Flight
    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor


class BegunCombine(NamedTuple):
    """For end_combine; its tensor is not to be read."""

    flight: _Flight
    x: torch.Tensor


class Rows(NamedTuple):
    """What a rank received: as autograd.Received, without counts."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    handle: AnyHandle


def begin_dispatch(
    buffer: Buffer,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    num_worst_tokens: int,
) -> BegunDispatch:
    """Arguments and errors as autograd.dispatch."""
    flight, apply = _Flight(buffer), _untyped(_BeginDispatch)
    tensors = apply(flight, x, topk_idx, topk_weights, num_experts, num_worst_tokens)
    return BegunDispatch(flight, *tensors)


def end_dispatch(begun: BegunDispatch) -> Rows:
    """Orders the current stream behind the dispatch; once for each begin_dispatch."""
    flight, x, ids, weights = begun
    x, weights = _untyped(_EndDispatch)(flight, x, ids, weights)
    assert flight.handle is not None
    return Rows(x, ids, weights, flight.handle)


def begin_combine(buffer: Buffer, x: torch.Tensor, handle: AnyHandle) -> BegunCombine:
    """Arguments and errors as autograd.combine."""
    flight = _Flight(buffer)
    flight.handle = handle
    return BegunCombine(flight, _untyped(_BeginCombine)(flight, x))


def end_combine(begun: BegunCombine) -> torch.Tensor:
    """[T, H]; orders the current stream behind the combine. Once for each begin_combine."""
    combined: torch.Tensor = _untyped(_EndCombine)(*begun)
    return combined


def _untyped(function: Any) -> Any:
    """torch gives `apply` no type."""
    return function.apply
