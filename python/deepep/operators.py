"""The operators behind deepep.ops: each with what it does, its shapes, and its gradient.

Users call deepep.ops. Buffers cannot cross an operator, so they go by name; a handle goes as three
tensors, see operator_routing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from deepep import operator_routing
from deepep.autograd import dispatch_rows
from deepep.buffer import Buffer
from deepep.operator_routing import Routing
from deepep.topology import num_local_experts

_buffers: weakref.WeakValueDictionary[str, Buffer] = weakref.WeakValueDictionary()


def register(buffer: Buffer) -> str:
    """The name by which operators find this Buffer, for as long as it lives."""
    name = f"buffer_{buffer._id}"
    _buffers[name] = buffer
    return name


def find(name: str) -> Buffer:
    """The Buffer that register() gave this name. Raises KeyError."""
    buffer = _buffers.get(name)
    if buffer is None:
        raise KeyError(
            f"No Buffer is registered as {name!r} in this process; call "
            "deepep.ops.register(buffer) and keep the Buffer alive."
        )
    return buffer


def operator(name: str, schema: str, body: Callable[..., Any], shapes: Callable[..., Any]) -> Any:
    """An operator of torch.library that changes none of its arguments."""
    library: Any = torch.library  # what it returns has no types
    made = library.custom_op(f"deepep::{name}", body, mutates_args=(), schema=schema)
    made.register_fake(shapes)
    return made


def data_dependent_size() -> Any:
    """A size that tracing does not know."""
    library: Any = torch.library
    return library.get_ctx().new_dynamic_size()


# ---- dispatch

_Tensors = tuple[torch.Tensor, ...]


def _run_dispatch(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    buffer: str,
    num_experts: int,
    num_worst_tokens: int,
) -> _Tensors:
    received, _ = dispatch_rows(
        find(buffer), x, topk_idx, topk_weights, num_experts, 1, num_worst_tokens
    )
    handle = received.handle
    return unshared(
        received.x,
        received.topk_idx,
        received.topk_weights,
        handle.num_recv_tokens_per_expert,
        *operator_routing.of_handle(handle),
    )


def unshared(*tensors: torch.Tensor) -> _Tensors:
    """The tensors, copied where an earlier one has the same storage: results must not alias."""
    seen: set[int] = set()
    result = []
    for tensor in tensors:
        storage = tensor.untyped_storage().data_ptr()
        result.append(tensor.clone() if storage and storage in seen else tensor)
        seen.add(storage)
    return tuple(result)


def _dispatch_shapes(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    buffer: str,
    num_experts: int,
    num_worst_tokens: int,
) -> _Tensors:
    owner, num_topk = find(buffer), topk_idx.shape[1]
    ranks = owner.group_size
    rows = num_worst_tokens or data_dependent_size()
    spans_nodes = owner._engine.nodes.num_nodes > 1
    unknown = data_dependent_size() if spans_nodes and not num_worst_tokens else None
    local = num_local_experts(num_experts, ranks, owner.rank)
    return (
        x.new_empty((rows, x.shape[1])),
        topk_idx.new_empty((rows, num_topk)),
        topk_weights.new_empty((rows, num_topk)),
        x.new_empty((local,), dtype=torch.int32),
        *operator_routing.shapes(owner, x, rows, unknown),
    )


def _save_dispatch(ctx: Any, inputs: tuple[Any, ...], output: _Tensors) -> None:
    ctx.buffer = inputs[3]
    ctx.save_for_backward(output[1], *output[4:])


def _backward_dispatch(ctx: Any, grad_x: Any, _idx: Any, grad_weights: Any, *_: Any) -> Any:
    recv_idx, *routing = ctx.saved_tensors
    # A weight of another rank's expert arrived as a constant 0, whatever was computed with it.
    own_weights = grad_weights.masked_fill(recv_idx < 0, 0.0)
    grad, grad_topk = combine_weights(grad_x, own_weights, *routing, ctx.buffer)
    return grad, None, grad_topk, None, None, None


dispatch = operator(
    "dispatch",
    "(Tensor x, Tensor topk_idx, Tensor topk_weights, str buffer, int num_experts, "
    "SymInt num_worst_tokens) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _run_dispatch,
    _dispatch_shapes,
)
dispatch.register_autograd(_backward_dispatch, setup_context=_save_dispatch)


# ---- Along a known routing: x, the three tensors of Routing, the Buffer's name

_ROUTING = "Tensor rank_prefix_matrix, Tensor recv_src_idx, Tensor send_head, str buffer"


def _run_combine(x: torch.Tensor, *routing: Any) -> torch.Tensor:
    owner = find(routing[3])
    return owner.combine(x.contiguous(), Routing(*routing[:3]).handle(owner))[0]


def _combine_shapes(x: torch.Tensor, *routing: Any) -> torch.Tensor:
    return x.new_empty((routing[2].shape[0], x.shape[1]))


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.buffer = inputs[4]
    ctx.save_for_backward(*inputs[1:4])


def _backward_combine(ctx: Any, grad: Any) -> Any:
    return dispatch_again(grad, *ctx.saved_tensors, ctx.buffer), None, None, None, None


combine = operator("combine", f"(Tensor x, {_ROUTING}) -> Tensor", _run_combine, _combine_shapes)
combine.register_autograd(_backward_combine, setup_context=_save_combine)


def _run_dispatch_again(x: torch.Tensor, *routing: Any) -> torch.Tensor:
    owner = find(routing[3])
    rows = owner.dispatch(x.contiguous(), handle=Routing(*routing[:3]).handle(owner))[0]
    assert isinstance(rows, torch.Tensor)
    return rows


def _dispatch_again_shapes(x: torch.Tensor, *routing: Any) -> torch.Tensor:
    return x.new_empty((routing[1].shape[0], x.shape[1]))


# The gradient of combine: it travels as the rows did.
dispatch_again = operator(
    "dispatch_again",
    f"(Tensor x, {_ROUTING}) -> Tensor",
    _run_dispatch_again,
    _dispatch_again_shapes,
)


def _run_combine_weights(x: torch.Tensor, topk_weights: torch.Tensor, *routing: Any) -> _Tensors:
    owner = find(routing[3])
    handle = Routing(*routing[:3]).handle(owner)
    combined, weights, _ = owner.combine(x.contiguous(), handle, topk_weights=topk_weights)
    assert weights is not None
    return combined, weights


def _combine_weights_shapes(x: torch.Tensor, topk_weights: torch.Tensor, *routing: Any) -> _Tensors:
    tokens = routing[2].shape[0]
    weights = topk_weights.new_empty((tokens, topk_weights.shape[1]))
    return x.new_empty((tokens, x.shape[1])), weights


# The gradient of dispatch: sums of the gradients of rows and of weights.
combine_weights = operator(
    "combine_weights",
    f"(Tensor x, Tensor topk_weights, {_ROUTING}) -> (Tensor, Tensor)",
    _run_combine_weights,
    _combine_weights_shapes,
)
