"""Dispatch and combine over nodes, on the network of the CPU: every kind of routing and shape.

Messages are late and overtake each other from a seed; kernels/internode_schedules_test.cc tries
many more schedules of small shapes, each replayable.
"""

from typing import Any

import pytest
import torch
from deepep import Buffer, CommTimeoutError, RankMismatchError, _runtime
from deepep.errors import BufferStateError, CapacityError, UnsupportedConfigError
from deepep.testing import run_processes, run_ranks

from tests.distributed import checks
from tests.distributed.cases import Case, cases_of, random_case
from tests.distributed.checks import Expected, expect

SHAPES = ((2, 1), (2, 2), (2, 4), (3, 2), (4, 2), (2, 8))
"""(nodes, ranks of a node)."""
CASES = [(nodes, size, case) for nodes, size in SHAPES for case in cases_of(nodes * size)]


def buffer_of(group: Any, ranks_per_node: int, **options: Any) -> Buffer:
    return Buffer(group, device="cpu", ranks_per_node=ranks_per_node, timeout=30, **options)


def round_trip(group: Any, expected: Expected, **options: Any) -> None:
    assert expected.ranks_per_node is not None
    with buffer_of(group, expected.ranks_per_node, **options) as buffer:
        handle = checks.round_trip(buffer, expected)
        received = buffer.dispatch(checks.payload(buffer, expected), handle)[0]
        want = expected.dispatched[buffer.rank].recv_x
        n = expected.received(buffer.rank)
        checks.same_payload("cached recv_x", checks.first(received, n), want)
        checks.combine(buffer, expected, handle)


@pytest.fixture(autouse=True)
def late_messages(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A network with a mind of its own, another one in each test."""
    seed = sum(map(ord, request.node.name)) % 9973 + 1
    monkeypatch.setenv("DEEPEP_NETWORK_SEED", str(seed))


@pytest.mark.parametrize(
    "nodes, size, case", CASES, ids=[f"{n}x{s}-{case.name}" for n, s, case in CASES]
)
def test_results_equal_the_reference(nodes: int, size: int, case: Case) -> None:
    run_ranks(nodes * size, round_trip, expect(case, size))


@pytest.mark.parametrize("seed", range(30))
def test_random_combinations_equal_the_reference(seed: int) -> None:
    nodes, size = SHAPES[seed % len(SHAPES)]
    run_ranks(nodes * size, round_trip, expect(random_case(seed, nodes * size), size))


def test_many_ranks_with_tiny_tensors() -> None:
    """16 nodes of 4: as many ranks as one memory domain could hold, and more queues than cores."""
    case = Case("many", (3,) * 64, 16, 128, 4, "holes", biases=1)
    run_ranks(64, round_trip, expect(case, 4), timeout=240)


def test_more_ranks_than_a_memory_domain_holds() -> None:
    case = Case("more", (2,) * 72, 16, 100, 3, "holes")
    run_ranks(72, round_trip, expect(case, 12), timeout=240)


def small_rings(group: Any, expected: Expected) -> None:
    """Network memory for one message a channel: every sender waits for every receiver."""
    nodes = expected.case.num_ranks // 2
    row, topk = expected.case.hidden * 2, expected.case.num_topk
    message = max(_runtime.internode_message_bytes(2, row, 0, topk, 8))
    size = _runtime.network_memory_hint(nodes, 2, Buffer.num_sms // 2, message, 1)
    round_trip(group, expected, num_rdma_bytes=size)


@pytest.mark.parametrize("name", ["plain", "odd_counts", "top32", "cold_experts"])
def test_one_slot_in_every_ring_is_enough(name: str) -> None:
    case = next(case for case in cases_of(4) if case.name == name)
    run_ranks(4, small_rings, expect(case, 2))


def rounds(group: Any, wanted: list[Expected]) -> None:
    """Shapes that divide the network's memory differently, one after the other."""
    with buffer_of(group, 2) as buffer:
        for _ in range(3):
            for expected in wanted:
                checks.round_trip(buffer, expected)


def test_shapes_follow_each_other_on_one_buffer() -> None:
    run_ranks(4, rounds, [expect(case, 2) for case in cases_of(4)])


def processes(group: Any, ranks_per_node: int, cases: list[Case]) -> None:
    for case in cases:
        round_trip(group, expect(case, ranks_per_node))


def test_ranks_that_are_processes_find_each_others_network_memory() -> None:
    run_processes(4, processes, 2, cases_of(4)[:6], timeout=100)


# ---- What is refused, and what goes wrong


def test_counts_on_the_network_are_those_of_the_protocol() -> None:
    """A row crosses once for each node, whatever the ranks there that it is for."""
    case = Case("counted", (20,) * 4, 64, 8, 8, "random")  # every token to every rank

    def count(group: Any) -> tuple[int, int]:
        with buffer_of(group, 2) as buffer:
            network = buffer._engine.network
            handle = checks.round_trip(buffer, expect(case, 2))
            messages, sent = network.messages_sent, network.bytes_sent
            buffer.dispatch(checks.payload(buffer, expect(case, 2)), handle)
            return network.messages_sent - messages, network.bytes_sent - sent

    message, _ = _runtime.internode_message_bytes(2, 128, 0, 0, 8)
    assert run_ranks(4, count) == [(20, 20 * message)] * 4


def late_node(group: Any) -> Any:
    with buffer_of(group, 2) as buffer:
        buffer._engine.domain.set_timeout(1.0)
        buffer._engine.timeout = 1.0
        if buffer.rank >= 2:
            group.barrier()
            return None
        ids = torch.zeros((3, 1), dtype=torch.int64)
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, 4)
        x = torch.zeros((3, 8), dtype=torch.bfloat16)
        with pytest.raises(CommTimeoutError) as caught:
            buffer.dispatch(
                x,
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_node,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
            )
        with pytest.raises(BufferStateError, match="reset"):
            buffer.get_dispatch_layout(ids, 4)
        group.barrier()
        return caught.value.missing_ranks


def test_a_node_that_does_not_come_is_named() -> None:
    assert run_ranks(4, late_node)[:2] == [(2,), (3,)]


def other_shape(group: Any) -> None:
    expected = expect(Case("shape", (5,) * 4, 64, 8, 2), 2)
    with buffer_of(group, 2) as buffer:
        handle = checks.round_trip(buffer, expected)
        hidden = 64 if buffer.rank < 2 else 128
        x = torch.zeros((5, hidden), dtype=torch.bfloat16)
        with pytest.raises((RankMismatchError, CommTimeoutError)) as caught:
            buffer._engine.domain.set_timeout(2.0)
            buffer.dispatch(x, handle)
        group.barrier()
        if isinstance(caught.value, RankMismatchError):
            assert "row_bytes is" in str(caught.value)
        buffer.reset()
        buffer._engine.domain.set_timeout(30.0)
        checks.round_trip(buffer, expected)


def test_nodes_with_other_shapes_are_told_and_a_reset_brings_them_back() -> None:
    run_ranks(4, other_shape)


def test_what_the_network_does_not_have_is_refused() -> None:
    def low_latency(group: Any) -> None:
        with pytest.raises(UnsupportedConfigError, match="low_latency_mode=True with 2 nodes"):
            buffer_of(group, 1, low_latency_mode=True, num_rdma_bytes=1 << 20)

    def uneven(group: Any) -> None:
        with pytest.raises(UnsupportedConfigError, match="ranks_per_node=2 with 3 ranks"):
            buffer_of(group, 2)

    def too_little(group: Any) -> None:
        with pytest.raises(ValueError, match="network memory of 4096 bytes has no room for rows"):
            buffer_of(group, 1, num_rdma_bytes=4096)

    def different(group: Any) -> None:
        with pytest.raises(UnsupportedConfigError, match="num_rdma_bytes must be the same"):
            buffer_of(group, 1, num_rdma_bytes=(1 << 22) + 4096 * group.rank())

    def contradicting(group: Any) -> None:
        with pytest.raises(UnsupportedConfigError, match="differ in ranks_per_node"):
            buffer_of(group, 1 + group.rank())

    bodies = ((2, low_latency), (3, uneven), (2, too_little), (2, different), (2, contradicting))
    for count, body in bodies:
        run_ranks(count, body)


def test_a_row_that_no_ring_holds_is_refused_before_anything_is_sent() -> None:
    def body(group: Any) -> None:
        expected = expect(Case("small", (5,) * 2, 64, 8, 2), 1)
        size = _runtime.network_memory_hint(2, 1, Buffer.num_sms // 2, 512, 1)
        with buffer_of(group, 1, num_rdma_bytes=size) as buffer:
            handle = checks.round_trip(buffer, expected)
            x = torch.zeros((5, 7168), dtype=torch.bfloat16)
            with pytest.raises(ValueError, match=r"the network memory has \d+ bytes, but messages"):
                buffer.dispatch(x, handle)
            checks.round_trip(buffer, expected)

    run_ranks(2, body)


def test_a_fixed_size_that_is_too_small_is_a_capacity_error() -> None:
    def body(group: Any) -> None:
        expected = expect(Case("tight", (30,) * 2, 64, 8, 8), 1)
        with buffer_of(group, 1) as buffer:
            with pytest.raises(CapacityError, match="num_worst_tokens"):
                checks.dispatch(buffer, expected, num_worst_tokens=10)
                buffer.get_dispatch_layout(torch.zeros((1, 1), dtype=torch.int64), 4)
            group.barrier()

    run_ranks(2, body)


def test_notes_about_forwarded_tokens_that_do_not_fit_are_a_capacity_error() -> None:
    """Rank 0 forwards the tokens of rank 2, and was told that no rank has so many."""

    def body(group: Any) -> str:
        expected = expect(Case("pass", (1, 1, 40, 1), 64, 2, 2, worst=0), 2)
        with buffer_of(group, 2, max_tokens_per_rank=5 if group.rank() == 0 else 40) as buffer:
            buffer._engine.domain.set_timeout(2.0)
            with pytest.raises((CapacityError, CommTimeoutError)) as caught:
                checks.dispatch(buffer, expected)
            group.barrier()
            return str(caught.value)

    assert "has room for notes about 5" in run_ranks(4, body)[0]
