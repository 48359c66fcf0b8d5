"""Buffer: V1's signatures and result structures, and refusals in words. A world of one rank."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepep import Buffer, Config, EventHandle, EventOverlap
from deepep.handles import DispatchHandle

# DeepEP V1, by position, with its defaults; what follows `*` is this library's own.
V1_PARAMETERS: dict[str, list[tuple[str, Any]]] = {
    "__init__": [
        ("group", None),  # V1: required, but may be None when comm is given
        ("num_nvl_bytes", 0),
        ("num_rdma_bytes", 0),
        ("low_latency_mode", False),
        ("num_qps_per_rank", 24),
        ("allow_nvlink_for_low_latency_mode", True),
        ("allow_mnnvl", False),
        ("explicitly_destroy", False),
        ("enable_shrink", False),
        ("comm", None),
    ],
    "get_dispatch_layout": [
        ("topk_idx", inspect.Parameter.empty),
        ("num_experts", inspect.Parameter.empty),
        ("previous_event", None),
        ("async_finish", False),
        ("allocate_on_comm_stream", False),
    ],
    "dispatch": [
        ("x", inspect.Parameter.empty),
        ("handle", None),
        ("num_tokens_per_rank", None),
        ("num_tokens_per_rdma_rank", None),
        ("is_token_in_rank", None),
        ("num_tokens_per_expert", None),
        ("topk_idx", None),
        ("topk_weights", None),
        ("expert_alignment", 1),
        ("num_worst_tokens", 0),
        ("config", None),
        ("previous_event", None),
        ("async_finish", False),
        ("allocate_on_comm_stream", False),
    ],
    "combine": [
        ("x", inspect.Parameter.empty),
        ("handle", inspect.Parameter.empty),
        ("topk_weights", None),
        ("bias", None),
        ("config", None),
        ("previous_event", None),
        ("async_finish", False),
        ("allocate_on_comm_stream", False),
    ],
    "set_num_sms": [("new_num_sms", inspect.Parameter.empty)],
    "get_dispatch_config": [("num_ranks", inspect.Parameter.empty)],
    "get_combine_config": [("num_ranks", inspect.Parameter.empty)],
    "capture": [],
    "is_sm90_compiled": [],
    "get_comm_stream": [],
    "destroy": [],
}


def parameters_of(function: Callable[..., object]) -> list[inspect.Parameter]:
    return [p for p in inspect.signature(function).parameters.values() if p.name != "self"]


@pytest.mark.parametrize("name", V1_PARAMETERS)
def test_signatures_are_those_of_v1(name: str) -> None:
    parameters = parameters_of(getattr(Buffer, name))
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [(p.name, p.default) for p in positional] == V1_PARAMETERS[name]
    extra = [p for p in parameters if p.kind is not p.POSITIONAL_OR_KEYWORD]
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in extra)


def test_what_later_versions_added_is_accepted_by_keyword() -> None:
    extra = {p.name for p in parameters_of(Buffer.__init__) if p.kind is p.KEYWORD_ONLY}
    assert extra >= {"use_fabric", "device", "hidden", "dtype", "timeout", "max_tokens_per_rank"}
    with Buffer(num_nvl_bytes=1 << 20, use_fabric=True, explicitly_destroy=True) as buffer:
        assert buffer.num_nvl_bytes == 1 << 20 and buffer.explicitly_destroy


def test_config_takes_v1_positions() -> None:
    names = [p.name for p in parameters_of(Config)]
    assert names == [
        "num_sms",
        "num_max_nvl_chunked_send_tokens",
        "num_max_nvl_chunked_recv_tokens",
        "num_max_rdma_chunked_send_tokens",
        "num_max_rdma_chunked_recv_tokens",
    ]
    assert [p.default for p in parameters_of(Config)] == [20, 6, 256, 6, 256]


def test_static_methods_need_no_buffer() -> None:
    assert Buffer.num_sms == 20
    for name in ("set_num_sms", "get_dispatch_config", "get_combine_config", "capture"):
        assert isinstance(inspect.getattr_static(Buffer, name), staticmethod), name
    try:
        Buffer.set_num_sms(24)
        assert Buffer.get_dispatch_config(12).num_sms == Buffer.get_combine_config(3).num_sms == 24
    finally:
        Buffer.set_num_sms(20)
    for bad in (0, 7, -2):
        with pytest.raises(ValueError, match=rf"num_sms is {bad}, but must be even"):
            Buffer.set_num_sms(bad)
    assert isinstance(Buffer.capture(), EventOverlap)


# ---- Results

TOKENS, HIDDEN, EXPERTS = 5, 64, 6
IDS = torch.tensor([[0, 3], [5, -1], [-1, -1], [2, 0], [1, 1]])
WEIGHTS = torch.rand((TOKENS, 2))
X = torch.randn((TOKENS, HIDDEN)).to(torch.bfloat16)


@pytest.fixture
def buffer() -> Any:
    with Buffer(device="cpu") as made:
        yield made


def routed(buffer: Buffer, **others: Any) -> dict[str, Any]:
    """Arguments of a good dispatch, some replaced."""
    layout = buffer.get_dispatch_layout(IDS, EXPERTS)
    good: dict[str, Any] = {
        "x": X,
        "num_tokens_per_rank": layout[0],
        "is_token_in_rank": layout[3],
        "num_tokens_per_expert": layout[2],
        "topk_idx": IDS,
        "topk_weights": WEIGHTS,
    }
    return {**good, **others}


def test_results_have_v1_structure(buffer: Buffer) -> None:
    layout = buffer.get_dispatch_layout(IDS, EXPERTS)
    assert isinstance(layout, tuple) and len(layout) == 5
    assert layout[0].tolist() == [4] and layout[1] is None
    assert layout[2].tolist() == [2, 2, 1, 1, 0, 1]
    assert layout[3][:, 0].tolist() == [True, True, False, True, True]
    assert isinstance(layout[4], EventOverlap) and layout[4].event is None

    result = buffer.dispatch(**routed(buffer))
    assert isinstance(result, tuple) and len(result) == 6
    x, ids, weights, counts, handle, event = result
    assert isinstance(x, torch.Tensor) and ids is not None and weights is not None
    assert (x.dtype, ids.dtype, weights.dtype) == (torch.bfloat16, torch.int64, torch.float32)
    assert counts == [2, 2, 1, 1, 0, 1] and type(counts) is list and type(counts[0]) is int
    assert isinstance(handle, tuple) and isinstance(handle, DispatchHandle) and len(handle) == 6
    prefix, channels, recv_channels, src_idx, in_rank, send_head = handle
    assert (prefix.tolist(), channels.tolist(), recv_channels.tolist()) == ([[4]], [[4]], [[0]])
    assert src_idx.tolist() == [0, 1, 3, 4] and in_rank.shape == (TOKENS, 1)
    assert send_head.flatten().tolist() == [0, 1, -1, 2, 3]
    assert isinstance(event, EventOverlap) and event.event is None

    combined = buffer.combine(x, handle, topk_weights=weights)
    assert isinstance(combined, tuple) and len(combined) == 3
    assert combined[0].shape == X.shape and combined[1] is not None
    assert combined[1].shape == WEIGHTS.shape and isinstance(combined[2], EventOverlap)
    assert len(buffer.dispatch(X, handle)) == 6


def test_events_may_be_passed_on_whether_or_not_they_hold_one(buffer: Buffer) -> None:
    """As Megatron-LM does: the event of the layout goes to dispatch, of dispatch to combine."""
    for asynchronous in (False, True):
        event = Buffer.capture() if asynchronous else EventOverlap()
        for _ in range(2):
            options: dict[str, Any] = {"previous_event": event, "async_finish": asynchronous}
            event = buffer.get_dispatch_layout(IDS, EXPERTS, **options)[4]
            options["previous_event"] = event
            x, _, _, _, handle, event = buffer.dispatch(**routed(buffer, **options))
            assert isinstance(event.event, EventHandle if asynchronous else type(None))
            options["previous_event"] = event
            assert isinstance(x, torch.Tensor)
            *_, event = buffer.combine(x, handle, **options)
    with pytest.raises(ValueError, match=r"allocate_on_comm_stream=True.*async_finish=True"):
        buffer.dispatch(**routed(buffer, allocate_on_comm_stream=True))
