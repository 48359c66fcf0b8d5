"""deep_ep has V1's names and signatures, and importing it loads nothing."""

import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import deep_ep
import deep_ep.utils
import deepep
import pytest
import torch

# V1's public methods as its specification has them: names, order and defaults of the arguments.
REQUIRED = object()
_EVENTS = {"previous_event": None, "async_finish": False, "allocate_on_comm_stream": False}
_COMBINE = {"x": REQUIRED, "handle": REQUIRED, "topk_weights": None, "bias": None, "config": None}
_DISPATCH = {
    "x": REQUIRED,
    "handle": None,
    "num_tokens_per_rank": None,
    "num_tokens_per_rdma_rank": None,
    "is_token_in_rank": None,
    "num_tokens_per_expert": None,
    "topk_idx": None,
    "topk_weights": None,
    "expert_alignment": 1,
    "num_worst_tokens": 0,
    "config": None,
}

CONSTRUCTOR = {
    "group": None,  # V1: required; here no group is a world of one rank
    "num_nvl_bytes": 0,
    "num_rdma_bytes": 0,
    "low_latency_mode": False,
    "num_qps_per_rank": 24,
    "allow_nvlink_for_low_latency_mode": True,
    "allow_mnnvl": False,
    "explicitly_destroy": False,
    "enable_shrink": False,
    "comm": None,
}

CONFIG = {
    "num_sms": 20,
    "num_max_nvl_chunked_send_tokens": 6,
    "num_max_nvl_chunked_recv_tokens": 256,
    "num_max_rdma_chunked_send_tokens": 6,
    "num_max_rdma_chunked_recv_tokens": 256,
}

NORMAL: dict[str, dict[str, object]] = {
    "destroy": {},
    "is_sm90_compiled": {},
    "set_num_sms": {"new_num_sms": REQUIRED},
    "capture": {},
    "get_comm_stream": {},
    "get_local_buffer_tensor": {
        "dtype": REQUIRED,
        "size": None,
        "offset": 0,
        "use_rdma_buffer": False,
    },
    "get_dispatch_config": {"num_ranks": REQUIRED},
    "get_combine_config": {"num_ranks": REQUIRED},
    "get_dispatch_layout": {"topk_idx": REQUIRED, "num_experts": REQUIRED, **_EVENTS},
    "dispatch": {**_DISPATCH, **_EVENTS},
    "combine": {**_COMBINE, **_EVENTS},
    "internode_dispatch": {**_DISPATCH, **_EVENTS},
    "internode_combine": {**_COMBINE, **_EVENTS},
}

LOW_LATENCY: dict[str, dict[str, object]] = {
    "get_low_latency_rdma_size_hint": {
        "num_max_dispatch_tokens_per_rank": REQUIRED,
        "hidden": REQUIRED,
        "num_ranks": REQUIRED,
        "num_experts": REQUIRED,
    },
    "clean_low_latency_buffer": {
        "num_max_dispatch_tokens_per_rank": REQUIRED,
        "hidden": REQUIRED,
        "num_experts": REQUIRED,
    },
    "low_latency_dispatch": {
        "x": REQUIRED,
        "topk_idx": REQUIRED,
        "num_max_dispatch_tokens_per_rank": REQUIRED,
        "num_experts": REQUIRED,
        "cumulative_local_expert_recv_stats": None,
        "dispatch_wait_recv_cost_stats": None,
        "use_fp8": True,
        "round_scale": False,
        "use_ue8m0": False,
        "async_finish": False,
        "return_recv_hook": False,
    },
    "low_latency_combine": {
        "x": REQUIRED,
        "topk_idx": REQUIRED,
        "topk_weights": REQUIRED,
        "handle": REQUIRED,
        "use_logfmt": False,
        "zero_copy": False,
        "async_finish": False,
        "return_recv_hook": False,
        "out": None,
        "combine_wait_recv_cost_stats": None,
    },
    "get_next_low_latency_combine_buffer": {"handle": REQUIRED},
    "low_latency_update_mask_buffer": {"rank_to_mask": REQUIRED, "mask": False},
    "low_latency_query_mask_buffer": {"mask_status": REQUIRED},
    "low_latency_clean_mask_buffer": {},
}


def parameters(function: Callable[..., Any], skip: int) -> dict[str, object]:
    """Positional arguments and their defaults, in order, without the first `skip`."""
    found = list(inspect.signature(function).parameters.values())[skip:]
    return {
        item.name: REQUIRED if item.default is item.empty else item.default
        for item in found
        if item.kind is item.POSITIONAL_OR_KEYWORD
    }


@pytest.mark.parametrize(("name", "expected"), {**NORMAL, **LOW_LATENCY}.items())
def test_a_method_takes_what_v1s_takes_in_the_same_order(
    name: str, expected: dict[str, object]
) -> None:
    raw = inspect.getattr_static(deep_ep.Buffer, name)
    skip = 0 if isinstance(raw, staticmethod) else 1
    found = parameters(getattr(deep_ep.Buffer, name), skip)
    assert list(found.items()) == list(expected.items())


def test_the_constructor_takes_what_v1s_takes_in_the_same_order() -> None:
    found = parameters(deep_ep.Buffer.__init__, 1)
    assert list(found.items()) == list(CONSTRUCTOR.items())


def test_use_fabric_is_a_keyword_since_only_some_versions_of_v1_have_it() -> None:
    item = inspect.signature(deep_ep.Buffer).parameters["use_fabric"]
    assert item.kind is item.KEYWORD_ONLY and item.default is False
    deep_ep.Buffer(None, 0, 0, False, 24, True, False, True, use_fabric=True, device="cpu")


def test_config_takes_what_v1s_takes_in_the_same_order() -> None:
    assert list(parameters(deep_ep.Config, 0).items()) == list(CONFIG.items())


@pytest.mark.parametrize("hint", ["get_nvl_buffer_size_hint", "get_rdma_buffer_size_hint"])
def test_size_hints_take_what_v1s_take(hint: str) -> None:
    found = parameters(getattr(deep_ep.Config, hint), 1)
    assert list(found.items()) == [("hidden_bytes", REQUIRED), ("num_ranks", REQUIRED)]


EVENTS: dict[str, dict[str, object]] = {
    "__init__": {"event": None, "extra_tensors": None},
    "current_stream_wait": {"release_handle": False},
    "register_hook_after_wait": {"hook": REQUIRED},
    "__call__": {"release_handle": False},
    "__enter__": {},
}


@pytest.mark.parametrize(("name", "expected"), EVENTS.items())
def test_an_event_takes_what_v1s_takes(name: str, expected: dict[str, object]) -> None:
    found = parameters(getattr(deep_ep.EventOverlap, name), 1)
    assert list(found.items()) == list(expected.items())


def test_names_are_those_of_deepep() -> None:
    assert issubclass(deep_ep.Buffer, deepep.Buffer)
    assert deep_ep.Config is deepep.Config
    assert deep_ep.EventHandle is deep_ep.utils.EventHandle is deepep.EventHandle
    assert deep_ep.EventOverlap is deep_ep.utils.EventOverlap is deepep.EventOverlap
    assert deep_ep.topk_idx_t is torch.int64
    assert deep_ep.__version__ == deepep.__version__
    assert {*deep_ep.__all__} <= {*dir(deep_ep)}
    with pytest.raises(AttributeError, match=r"no attribute 'ElasticBuffer'.*has V1's Buffer"):
        _ = deep_ep.ElasticBuffer


def test_importing_it_loads_neither_torch_nor_a_kernel() -> None:
    code = (
        "import sys, deep_ep, deep_ep.utils;"
        "assert not {'torch', 'numpy', 'deepep._runtime'} & sys.modules.keys(), sys.modules.keys()"
    )
    environ = {"PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environ)


def test_attributes_that_frameworks_read() -> None:
    with deep_ep.Buffer(None, 1024, 0, explicitly_destroy=True, device="cpu") as buffer:
        assert (buffer.rank, buffer.group_size, buffer.group) == (0, 1, None)
        assert (buffer.num_nvl_bytes, buffer.num_rdma_bytes) == (1024, 0)
        assert buffer.explicitly_destroy and not buffer.low_latency_mode
        assert not buffer.enable_shrink and deep_ep.Buffer.num_sms == 20
        assert buffer.runtime is not None and buffer.runtime.is_available()
        assert buffer.runtime.get_num_rdma_ranks() == 1
        assert (buffer.runtime.get_rdma_rank(), buffer.runtime.get_root_rdma_rank(True)) == (0, 0)
        assert buffer.runtime.get_local_device_id() == -1
    assert buffer.runtime is None


def test_set_num_sms_reaches_the_configurations_through_class_and_instance() -> None:
    before = deep_ep.Buffer.num_sms
    try:
        with deep_ep.Buffer(device="cpu") as buffer:
            buffer.set_num_sms(24)
            assert deep_ep.Buffer.num_sms == deepep.Buffer.num_sms == 24
            assert deep_ep.Buffer.get_dispatch_config(8).num_sms == 24
            assert deep_ep.Buffer.get_combine_config(8).num_sms == 24
    finally:
        deep_ep.Buffer.set_num_sms(before)


def test_the_inter_node_names_do_what_dispatch_and_combine_do() -> None:
    x, ids = torch.ones(3, 64).bfloat16(), torch.tensor([[0], [1], [-1]])
    with deep_ep.Buffer(device="cpu") as buffer:
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, 2)
        layout = (per_rank, per_node, in_rank, per_expert)
        recv_x, *_, handle, _ = buffer.internode_dispatch(
            x, None, *layout, ids, torch.ones(3, 1), config=buffer.get_dispatch_config(1)
        )
        out, _, _ = buffer.internode_combine(recv_x, handle, config=buffer.get_combine_config(1))
    assert out[:, 0].tolist() == [1.0, 1.0, 0.0]


def test_a_handle_is_indexed_like_v1s() -> None:
    ids = torch.tensor([[0], [1]])
    with deep_ep.Buffer(device="cpu") as buffer:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, 2)
        handle = buffer.dispatch(
            torch.ones(2, 8).bfloat16(), None, per_rank, None, in_rank, per_expert
        )[4]
    rank_prefix_matrix, _, _, recv_src_idx, is_token_in_rank, send_head = handle
    assert len(handle) == 6 and handle[-1] is send_head
    assert rank_prefix_matrix.tolist() == [[2]] and recv_src_idx.tolist() == [0, 1]
    assert is_token_in_rank.tolist() == [[True], [True]]


def test_the_buffer_to_look_into_is_refused_with_the_way_out() -> None:
    with (
        deep_ep.Buffer(device="cpu") as buffer,
        pytest.raises(deepep.UnsupportedConfigError, match=r"get_local_buffer_tensor.*empty"),
    ):
        buffer.get_local_buffer_tensor(torch.int32)


def test_the_low_latency_size_hint_is_what_a_buffer_takes_and_less_than_v1s() -> None:
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 288)
    assert hint < 2_146_961_792
    with deep_ep.Buffer(None, 0, 4096, low_latency_mode=True, device="cpu") as buffer:
        assert buffer.low_latency_mode and buffer.num_rdma_bytes == 4096
