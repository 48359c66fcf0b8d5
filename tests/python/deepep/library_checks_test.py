"""What the entry functions of a kernel library refuse by themselves, whoever calls them.

The arguments hold no address: a check that came too late would be a crash.
"""

import re
from collections.abc import Iterator

import pytest
from deepep import _runtime, errors, registry
from deepep.topology import Requirement

HIDDEN, TOO_WIDE = 64, 33


@pytest.fixture(scope="module")
def library() -> _runtime.Library:
    chosen = registry.select(Requirement("intranode", "host", HIDDEN, "bf16", 1))
    registry.verify(chosen.entry)
    return _runtime.Library(str(chosen.entry.path))


@pytest.fixture
def domain() -> Iterator[_runtime.Domain]:
    made = _runtime.Domain(0, 1)
    made.connect([made.describe()])
    yield made
    made.close()


COUNT = r"must be 0 to 2147483647"
LAYOUT = [
    ({"num_tokens": -1}, rf"num_tokens is -1, but {COUNT}"),
    ({"num_topk": -1, "idx_bytes": 8}, r"num_topk is -1, but must be 0 to 32"),
    ({"num_topk": TOO_WIDE, "idx_bytes": 8}, r"num_topk is 33, but must be 0 to 32"),
    ({"num_topk": 1, "idx_bytes": 2}, r"idx_bytes is 2, but ids have 4 or 8 bytes"),
    ({"num_topk": 1}, r"idx_bytes is 0, but ids have 4 or 8 bytes"),
]
DISPATCH = [
    *LAYOUT,
    ({"recv_capacity": -2}, rf"recv_capacity is -2, but {COUNT}"),
    ({"num_scales": -1}, r"num_scales is -1, but must be 0 to 0"),
    ({"hidden": -HIDDEN}, r"a row has -128 bytes, but must have a positive multiple of 16"),
]
COMBINE = [
    ({"num_tokens": -1}, rf"num_tokens is -1, but {COUNT}"),
    ({"num_recv": -3}, rf"num_recv is -3, but {COUNT}"),
    ({"num_topk": TOO_WIDE}, r"num_topk is 33, but must be 0 to 32"),
]


def refused(library: _runtime.Library, status: int, words: str) -> None:
    assert status == errors.STATUS_INVALID_ARGUMENT
    assert re.search(words, library.last_error())


@pytest.mark.parametrize(("bad", "words"), LAYOUT)
def test_layout_refuses(library: _runtime.Library, bad: dict[str, int], words: str) -> None:
    args = _runtime.LayoutArgs(**{"num_ranks": 1, "num_experts": 1, "num_tokens": 1, **bad})
    refused(library, library.layout(args), words)


def test_notify_refuses(library: _runtime.Library, domain: _runtime.Domain) -> None:
    args = _runtime.NotifyArgs(num_experts=1, num_tokens=-1)
    refused(library, library.notify(domain, args), rf"num_tokens is -1, but {COUNT}")


@pytest.mark.parametrize(("bad", "words"), DISPATCH)
def test_dispatch_refuses(
    library: _runtime.Library, domain: _runtime.Domain, bad: dict[str, int], words: str
) -> None:
    args = _runtime.DispatchArgs(**{"num_experts": 1, "hidden": HIDDEN, **bad})
    refused(library, library.dispatch(domain, args), words)


@pytest.mark.parametrize(("bad", "words"), COMBINE)
def test_combine_refuses(
    library: _runtime.Library, domain: _runtime.Domain, bad: dict[str, int], words: str
) -> None:
    args = _runtime.CombineArgs(**{"hidden": HIDDEN, **bad})
    refused(library, library.combine(domain, args), words)
