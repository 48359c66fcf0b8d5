"""Bad arguments of Buffer: the text says what, the value, the rule and the cure; nothing is sent.

A world of one rank, whose Buffer must work after every refusal.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from deepep import Buffer, CapacityError, UnsupportedConfigError

TOKENS, HIDDEN, EXPERTS = 5, 64, 6
IDS = torch.tensor([[0, 3], [5, -1], [-1, -1], [2, 0], [1, 1]])
WEIGHTS = torch.rand((TOKENS, 2))
X = torch.randn((TOKENS, HIDDEN)).to(torch.bfloat16)
FP8 = torch.zeros((TOKENS, HIDDEN), dtype=torch.float8_e4m3fn)
SCALES = torch.ones((TOKENS, 1))


@pytest.fixture(scope="module")
def shared() -> Iterator[Buffer]:
    with Buffer(device="cpu") as made:
        yield made


def routed(buffer: Buffer) -> dict[str, Any]:
    layout = buffer.get_dispatch_layout(IDS, EXPERTS)
    return {
        "x": X,
        "num_tokens_per_rank": layout[0],
        "is_token_in_rank": layout[3],
        "num_tokens_per_expert": layout[2],
        "topk_idx": IDS,
        "topk_weights": WEIGHTS,
    }


@pytest.fixture
def buffer(shared: Buffer) -> Iterator[Buffer]:
    """The Buffer, which works before and after each refusal."""
    yield shared
    x, *_, handle, _ = shared.dispatch(**routed(shared))
    assert isinstance(x, torch.Tensor)
    assert torch.equal(shared.combine(x, handle)[0][[0, 1, 3, 4]], X[[0, 1, 3, 4]])


DISPATCH: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "list": ({"x": [[1.0]]}, TypeError, r"x is a list, but must be a torch\.Tensor"),
    "float32": (
        {"x": X.float()},
        TypeError,
        r"x is \[5, 64\] torch\.float32, but its dtype must be torch\.bfloat16.*x\.to\(",
    ),
    "three dimensions": (
        {"x": X[None]},
        ValueError,
        r"x is \[1, 5, 64\].*shape must be \[any, any",
    ),
    "columns": (
        {"x": X.t().contiguous().t()},
        ValueError,
        r"strides \[1, 5\].*contiguous; pass x\.contiguous\(\)",
    ),
    "14 bytes": (
        {"x": X[:, :7].contiguous()},
        ValueError,
        r"rows of 14 bytes.*multiple of 16 bytes; pad hidden to 8",
    ),
    "no columns": ({"x": X[:, :0].contiguous()}, ValueError, r"rows of 0 bytes.*pad hidden to 8"),
    "FP8 alone": ({"x": FP8}, TypeError, r"without scales; pass FP8 as a tuple \(data, scales\)"),
    "triple": ({"x": (FP8, SCALES, SCALES)}, TypeError, r"a tuple of 3, but must be"),
    "BF16 with scales": ({"x": (X, SCALES)}, TypeError, r"x\[0\].*torch\.float8_e4m3fn"),
    "scales of another type": ({"x": (FP8, SCALES.double())}, TypeError, r"x\[1\].*torch\.float32"),
    "scales of other tokens": (
        {"x": (FP8, SCALES[:4])},
        ValueError,
        r"x\[1\] is \[4, 1\].*\[5, any",
    ),
    "no scales": ({"x": (FP8, SCALES[:, :0])}, ValueError, r"x\[1\].*1 to 16383 scales"),
    "no layout": (
        {"num_tokens_per_rank": None},
        ValueError,
        r"num_tokens_per_rank is missing.*get_",
    ),
    "no flags": ({"is_token_in_rank": None}, ValueError, r"is_token_in_rank is missing"),
    "no expert counts": (
        {"num_tokens_per_expert": None},
        ValueError,
        r"num_tokens_per_expert is m",
    ),
    "counts of 2 ranks": (
        {"num_tokens_per_rank": torch.zeros(2, dtype=torch.int32)},
        ValueError,
        r"num_tokens_per_rank is \[2\] torch\.int32, but its shape must be \[1\]",
    ),
    "int64 counts": (
        {"num_tokens_per_rank": torch.zeros(1, dtype=torch.int64)},
        TypeError,
        r"num_tokens_per_rank.*dtype must be torch\.int32",
    ),
    "integer flags": (
        {"is_token_in_rank": torch.ones((5, 1), dtype=torch.int32)},
        TypeError,
        r"is_token_in_rank.*torch\.bool",
    ),
    "counts that lie": (
        {"num_tokens_per_rank": torch.full((1,), 5, dtype=torch.int32)},
        ValueError,
        r"num_tokens_per_rank\[0\] is 5, but is_token_in_rank marks 4.*get_dispatch_layout",
    ),
    "no experts": (
        {"num_tokens_per_expert": torch.zeros(0, dtype=torch.int32)},
        ValueError,
        r"num_experts=0: there must be at least 1",
    ),
    "network ranks": (
        {"num_tokens_per_rdma_rank": torch.zeros(1, dtype=torch.int32)},
        ValueError,
        r"num_tokens_per_rdma_rank was given, but the group has no network ranks",
    ),
    "ids alone": ({"topk_weights": None}, ValueError, r"topk_idx and topk_weights.*together"),
    "33 choices": (
        {"topk_idx": torch.zeros((5, 33), dtype=torch.int64), "topk_weights": torch.zeros((5, 33))},
        ValueError,
        r"topk_idx is \[5, 33\].*1 to 32 experts",
    ),
    "ids of other tokens": ({"topk_idx": IDS[:3]}, ValueError, r"topk_idx is \[3, 2\].*\[5, any\]"),
    "weights of other width": (
        {"topk_weights": WEIGHTS[:, :1]},
        ValueError,
        r"topk_weights is \[5, 1\].*\[5, 2\]",
    ),
    "half weights": ({"topk_weights": WEIGHTS.half()}, TypeError, r"topk_weights.*torch\.float32"),
    "alignment": ({"expert_alignment": 0}, ValueError, r"expert_alignment is 0.*at least 1"),
    "negative size": ({"num_worst_tokens": -1}, ValueError, r"num_worst_tokens is -1.*positive"),
    "size without ids": (
        {"num_worst_tokens": 9, "topk_idx": None, "topk_weights": None},
        ValueError,
        r"num_worst_tokens is 9.*topk_idx",
    ),
    "size beyond 32 bits": (
        {"num_worst_tokens": 2**31},
        CapacityError,
        r"num_worst_tokens is 2147483648.*at most 2147483647",
    ),
    "another device": ({"x": X.to("meta")}, ValueError, r"x is on meta.*works on cpu; move it"),
}


@pytest.mark.parametrize("bad, kind, text", DISPATCH.values(), ids=DISPATCH.keys())
def test_dispatch_refuses_in_words(
    buffer: Buffer, bad: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        buffer.dispatch(**{**routed(buffer), **bad})


LAYOUT: dict[str, tuple[torch.Tensor, int, type[Exception], str]] = {
    "too large": (IDS, 5, ValueError, r"topk_idx\[1\]\[0\] is 5.*0 to 4, or -1"),
    "below -1": (IDS - 1, 6, ValueError, r"topk_idx\[1\]\[1\] is -2"),
    "beyond 32 bits": (IDS + 2**32, 6, ValueError, r"is 4294967296"),
    "no experts": (IDS, 0, ValueError, r"num_experts is 0.*1 to 1024"),
    "many experts": (IDS, 1025, ValueError, r"num_experts is 1025.*1 to 1024 \(1024 each\)"),
    "one dimension": (IDS[:, 0], 6, ValueError, r"topk_idx is \[5\].*\[any, any\]"),
    "no choice": (IDS[:, :0], 6, ValueError, r"topk_idx is \[5, 0\].*1 to 32 experts"),
    "int16": (IDS.short(), 6, TypeError, r"torch\.int64 or torch\.int32"),
}


@pytest.mark.parametrize("ids, experts, kind, text", LAYOUT.values(), ids=LAYOUT.keys())
def test_layout_refuses_in_words(
    buffer: Buffer, ids: torch.Tensor, experts: int, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        buffer.get_dispatch_layout(ids, experts)


COMBINE: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "float16": ({"x": X[:4].half()}, TypeError, r"x is \[4, 64\] torch\.float16.*torch\.bfloat16"),
    "rows": ({"x": X}, ValueError, r"x has 5 rows, but the dispatch.*returned 4; pass one row"),
    "weights": ({"topk_weights": WEIGHTS}, ValueError, r"topk_weights is \[5, 2\].*\[4, any\]"),
    "33 weights": (
        {"topk_weights": torch.ones((4, 33))},
        ValueError,
        r"topk_weights is \[4, 33\].*1 to 32",
    ),
    "bias of other shape": ({"bias": X[:4]}, ValueError, r"bias\[0\] is \[4, 64\].*\[5, 64\]"),
    "bias of other type": ({"bias": (X, X.float())}, TypeError, r"bias\[1\].*torch\.bfloat16"),
    "three biases": ({"bias": (X, X, X)}, ValueError, r"a tuple of 3, but must be one.*or two"),
    "plain tuple": ({"handle": (X,) * 6}, TypeError, r"handle is a tuple; pass the DispatchHandle"),
    "no handle": ({"handle": None}, TypeError, r"handle is a NoneType"),
}


@pytest.mark.parametrize("bad, kind, text", COMBINE.values(), ids=COMBINE.keys())
def test_combine_refuses_in_words(
    buffer: Buffer, bad: dict[str, Any], kind: type[Exception], text: str
) -> None:
    handle = buffer.dispatch(**routed(buffer))[4]
    with pytest.raises(kind, match=text):
        buffer.combine(**{"x": X[:4], "handle": handle, **bad})


@pytest.mark.parametrize("name", ["num_tokens_per_rank", "is_token_in_rank", "topk_idx"])
def test_a_handle_and_a_routing_contradict_each_other(buffer: Buffer, name: str) -> None:
    good = routed(buffer)
    handle = buffer.dispatch(**good)[4]
    with pytest.raises(ValueError, match=rf"{name} was given together with handle.*one of the two"):
        buffer.dispatch(X, handle, **{name: good[name]})
    with pytest.raises(ValueError, match="num_tokens_per_rdma_rank was given together with handle"):
        buffer.dispatch(X, handle, num_tokens_per_rdma_rank=good["num_tokens_per_rank"])
    with pytest.raises(ValueError, match="num_worst_tokens is 7 together with handle"):
        buffer.dispatch(X, handle, num_worst_tokens=7)


CONSTRUCTOR: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "shrink": ({"enable_shrink": True}, ValueError, r"low_latency_mode=False.*Pass low_latency"),
    "device": ({"device": "meta"}, UnsupportedConfigError, r"device='meta'.*'cpu'"),
    "group": ({"group": "world"}, TypeError, r"group is a builtins\.str; accepted are"),
    "timeout": ({"timeout": 0}, ValueError, r"timeout=0.*above 0"),
    "row": ({"hidden": 7}, UnsupportedConfigError, r"hidden=7.*14 bytes.*Pad hidden to 8"),
    "FP8 row": (
        {"hidden": 24, "dtype": torch.float8_e4m3fn},
        UnsupportedConfigError,
        r"24 bytes.*Pad hidden to 32",
    ),
    "type": (
        {"hidden": 64, "dtype": torch.float32},
        TypeError,
        r"dtype is torch\.float32.*torch\.bfloat16, or FP8",
    ),
    "capacity": (
        {"max_tokens_per_rank": -1},
        ValueError,
        r"max_tokens_per_rank=-1: must be at least 0",
    ),
}


@pytest.mark.parametrize("bad, kind, text", CONSTRUCTOR.values(), ids=CONSTRUCTOR.keys())
def test_the_constructor_refuses_in_words(
    bad: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        Buffer(**bad)
