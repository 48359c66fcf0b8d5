"""The parts of the GPU's engine that need no GPU: how many blocks, whose memory, which stream."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from deepep import _runtime, cuda_engine
from deepep.config import Config
from deepep.cuda_engine import CudaEngine
from deepep.errors import BufferStateError, UnsupportedConfigError
from deepep.nodes import Nodes

Make = Callable[..., CudaEngine]


@pytest.fixture
def domain() -> Iterator[_runtime.Domain]:
    """Of the host; a GPU's has the same functions."""
    made = _runtime.Domain(0, 1)
    made.connect([made.describe()])
    yield made
    made.close()


@pytest.fixture
def make(domain: _runtime.Domain) -> Make:
    """An engine whose constructor, which asks the GPU, has not run."""

    def engine(**attributes: Any) -> CudaEngine:
        made = CudaEngine.__new__(CudaEngine)
        defaults = {
            "device": torch.device("cpu"),
            "_index": 0,
            "_pool": None,
            "_domain": domain,
            "_foreign": set(),
            "_sharing": 1,
            "_has_run": False,
            "_is_capturing": lambda: False,
        }
        for name, value in (defaults | attributes).items():
            setattr(made, name, value)
        return made

    return engine


# ---- Blocks: those of all ranks on a device must be resident together


def resident(
    make: Make, reported: int, sharing: int, share: str | None, utilization: str = ""
) -> int:
    environment = {} if share is None else {cuda_engine.MPS_SHARE_VARIABLE: share}
    environment["DEEPEP_SM_UTILIZATION"] = utilization
    with (
        mock.patch.object(_runtime, "num_multiprocessors", lambda index: reported),
        mock.patch.dict("os.environ", environment, clear=True),
    ):
        return make(_sharing=sharing)._resident_blocks()


@pytest.mark.parametrize(
    "reported, sharing, share, blocks",
    [
        (132, 1, None, 132),
        (132, 8, None, 16),
        (132, 132, None, 1),
        (16, 8, "12", 16),  # 12% of 132, for each of 8 ranks: the shares are apart
        (66, 8, "50", 16),  # eight halves overlap
        (66, 2, "50", 66),
        (132, 4, "100", 33),
        (132, 4, "0", 33),  # no limit
        (132, 4, "half", 33),
    ],
)
def test_blocks_of_ranks_on_one_device_fit_it_together(
    make: Make, reported: int, sharing: int, share: str | None, blocks: int
) -> None:
    # Half of it, so that two operations can run, unless the user says otherwise.
    half = blocks if sharing == 1 else max(1, blocks // 2)
    assert resident(make, reported, sharing, share) == half
    assert resident(make, reported, sharing, share, utilization="1") == blocks


@pytest.mark.parametrize("reported, share, whole", [(132, None, 132), (66, "50", 132)])
def test_more_ranks_than_multiprocessors_are_refused_with_the_numbers(
    make: Make, reported: int, share: str | None, whole: int
) -> None:
    with pytest.raises(UnsupportedConfigError) as caught:
        resident(make, reported, 133, share)
    for part in (f"133 ranks share a device of {whole}", f"may use {reported}", f"most {whole}"):
        assert part in str(caught.value)


def test_a_call_takes_what_it_asks_for_up_to_that(make: Make) -> None:
    engine = make(_max_blocks=16)
    assert engine.num_blocks(None, 20) == 16 and engine.num_blocks(None, 8) == 8
    assert engine.num_blocks(Config(4), 20) == 4 and engine.num_blocks(Config(128), 20) == 16


# ---- Memory without torch.cuda.MemPool


@pytest.fixture
def no_pool(make: Make) -> Iterator[CudaEngine]:
    """On a GPU a block becomes a tensor by its CUDA array interface; here by its buffer."""
    with mock.patch.object(
        CudaEngine, "_as_tensor", lambda self, block, dtype: torch.frombuffer(block, dtype=dtype)
    ):
        yield make()


def test_results_come_from_the_domains_own_pool_and_go_back_there(no_pool: CudaEngine) -> None:
    parts = ((3, 8), torch.bfloat16), ((3,), torch.int32)
    memory = no_pool.piece(*parts)
    tensors = memory.tensors()
    assert [tensor.shape for tensor in tensors] == [(3, 8), (3,)]
    assert [tensor.data_ptr() for tensor in tensors] == memory.addresses
    assert all(map(no_pool.is_exported, tensors))
    assert no_pool.memory_bytes()["used"] == 512
    together = no_pool.empty(*parts)
    assert together[1].data_ptr() - together[0].data_ptr() == 256, "one piece"
    del memory, tensors, together
    assert no_pool.memory_bytes()["used"] == 0


def test_other_tensors_are_copied(no_pool: CudaEngine) -> None:
    tensor = torch.zeros((4, 8), dtype=torch.bfloat16)
    copy = no_pool.exported(tensor)
    assert copy.shape == tensor.shape and copy.dtype == tensor.dtype
    assert copy.data_ptr() != tensor.data_ptr() and no_pool.is_exported(copy)
    assert no_pool.exported(copy) is copy
    with no_pool.memory_pool():
        assert not no_pool.is_exported(torch.zeros(4))


def test_a_block_tells_a_gpu_tensor_where_it_lies(domain: _runtime.Domain) -> None:
    block: Any = domain.allocate(300)
    assert block.__cuda_array_interface__ == {
        "shape": (300,),
        "typestr": "|u1",
        "data": (block.address, False),
        "version": 2,
    }


def test_no_fabric_is_refused_as_a_wish_and_other_failures_stay_what_they_are(make: Make) -> None:
    no_fabric = mock.patch.object(_runtime, "Domain", side_effect=RuntimeError("no IMEX"))
    alone = Nodes(rank=0, num_nodes=1, ranks_per_node=1)
    wanted, unwanted = (make(_use_fabric=use, nodes=alone) for use in (True, False))
    with no_fabric, pytest.raises(UnsupportedConfigError, match="use_fabric=True on cpu: no IMEX"):
        wanted._make_domain()
    with no_fabric as made, pytest.raises(RuntimeError, match=r"^no IMEX$"):
        unwanted._make_domain()
    made.assert_called_once_with(0, 1, 0, False)


# ---- Memory of torch's pools


def test_an_allocation_is_looked_up_once_and_again_when_another_took_its_place(make: Make) -> None:
    """What is told by address alone would be taken for the allocation that was there before."""
    segments = [
        {"address": 0x5000, "segment_pool_id": (0, 7)},
        {"address": 0x7000, "segment_pool_id": (0, 8)},  # of another pool
    ]
    snapshot = mock.Mock(return_value=segments)
    exported = list[int]()
    stand_in = SimpleNamespace(exports=lambda *_: False, export_allocation=exported.append)
    engine = make(_pool=object(), _pool_id=(0, 7), _domain=stand_in)
    tensor = torch.zeros(4)

    def asked(base: int, identity: int) -> tuple[bool, int]:
        found = mock.patch.object(_runtime, "allocation_of", lambda data: (base, 64, identity))
        with found, mock.patch.object(torch.cuda, "memory_snapshot", snapshot):
            return engine.is_exported(tensor), snapshot.call_count

    assert asked(0x9000, 1) == (False, 1) and asked(0x9000, 1) == (False, 1)
    assert asked(0x9000, 2) == (False, 2), "the same address, another allocation"
    assert asked(0x7000, 3) == (False, 3), "of another pool"
    assert asked(0x5000, 4) == (True, 4) and exported == [0x5000]


# ---- Capture


def test_what_a_capture_does_not_allow_is_refused(make: Make) -> None:
    capturing = make(_is_capturing=lambda: True)
    with pytest.raises(BufferStateError, match="first call of this Buffer"):
        capturing.check_capture(host_waits=False)
    capturing._has_run = True
    capturing.check_capture(host_waits=False)
    with pytest.raises(BufferStateError, match="num_worst_tokens, or a handle"):
        capturing.check_capture(host_waits=True)
    fresh = make()
    fresh.check_capture(host_waits=True)
    assert fresh._has_run
