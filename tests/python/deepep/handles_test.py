"""DispatchHandle: V1's tuple, extra facts, immutability, ownership."""

import copy
import pickle

import pytest
import torch
from deepep.errors import BufferStateError
from deepep.handles import DispatchHandle, require_handle


def make_handle(buffer_id: int = 1) -> DispatchHandle:
    return DispatchHandle(
        rank_prefix_matrix=torch.zeros(4, 4, dtype=torch.int32),
        channel_prefix_matrix=torch.zeros(4, 1, dtype=torch.int32),
        recv_channel_prefix_matrix=torch.zeros(4, 1, dtype=torch.int32),
        recv_src_idx=torch.zeros(9, dtype=torch.int32),
        is_token_in_rank=torch.zeros(5, 4, dtype=torch.bool),
        send_head=torch.full((5, 4), -1, dtype=torch.int32),
        num_experts=32,
        num_topk=8,
        num_recv_tokens=9,
        num_recv_tokens_per_expert=torch.zeros(8, dtype=torch.int32),
        recv_capacity=9,
        hidden=512,
        elem_bytes=2,
        num_scales=0,
        buffer_id=buffer_id,
    )


def test_it_unpacks_like_the_tuple_of_v1() -> None:
    handle = make_handle()
    assert isinstance(handle, tuple)
    assert len(handle) == 6
    prefix, channel, recv_channel, src_idx, in_rank, send_head = handle
    assert prefix is handle.rank_prefix_matrix is handle[0]
    assert channel is handle.channel_prefix_matrix is handle[1]
    assert recv_channel is handle.recv_channel_prefix_matrix is handle[2]
    assert src_idx is handle.recv_src_idx is handle[3]
    assert in_rank is handle.is_token_in_rank is handle[4]
    assert send_head is handle.send_head is handle[-1]


def test_extra_facts_are_attributes() -> None:
    handle = make_handle()
    assert handle.num_tokens == 5
    assert handle.num_ranks == 4
    assert handle.num_recv_tokens == 9
    assert (handle.hidden, handle.elem_bytes, handle.num_scales) == (512, 2, 0)
    assert "num_recv_tokens=9" in repr(handle)


def test_it_cannot_be_changed_copied_or_pickled() -> None:
    handle = make_handle()
    with pytest.raises(AttributeError, match="immutable"):
        handle.hidden = 1
    with pytest.raises(AttributeError, match="immutable"):
        del handle.hidden
    with pytest.raises(TypeError, match="live Buffer"):
        pickle.dumps(handle)
    with pytest.raises(TypeError, match="live Buffer"):
        copy.copy(handle)


def test_it_compares_by_identity() -> None:
    handle, other = make_handle(), make_handle()
    assert handle == handle
    assert handle != other
    assert {handle: 1}[handle] == 1


def test_handle_of_another_buffer_is_refused_with_both_names() -> None:
    handle = make_handle(buffer_id=3)
    assert require_handle(handle, 3) is handle
    with pytest.raises(BufferStateError, match=r"Buffer 3, this is Buffer 4"):
        require_handle(handle, 4)


def test_rebuilt_tuples_are_refused_in_words() -> None:
    with pytest.raises(TypeError, match="handle is a tuple"):
        require_handle(tuple(make_handle()), 1)
    with pytest.raises(TypeError, match="handle is a NoneType"):
        require_handle(None, 1)
