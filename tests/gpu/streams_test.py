"""Streams and events: what is ordered behind what, and two operations at the same time."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import pytest
import torch
from deepep import Buffer, EventOverlap, reference

from tests.distributed import checks
from tests.distributed.cases import Case, find
from tests.distributed.checks import Expected, expect
from tests.gpu.ranks import Rank, on_ranks

COUNTS = (2, 8)
LONG = 20_000_000  # cycles: some 10 ms


def busy(cycles: int = LONG) -> None:
    """Keeps the current stream busy."""
    cast(Any, torch.cuda)._sleep(cycles)


def stream() -> Any:
    return cast(Any, torch.cuda).Stream()


def on(a_stream: Any) -> AbstractContextManager[None]:
    return cast("AbstractContextManager[None]", torch.cuda.stream(a_stream))


def waited(result: Any) -> Any:
    """The result of an asynchronous call, after its event, in the shape of a synchronous one."""
    assert result[-1].event is not None, "async_finish=True gives an event"
    result[-1].current_stream_wait()
    return (*result[:-1], EventOverlap())


def late_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that is filled only after the current stream has been busy; NaN or -1 until then."""
    copy = torch.full_like(tensor, float("nan") if tensor.is_floating_point() else -1)
    torch.cuda.current_stream().synchronize()
    busy()
    return copy.copy_(tensor)


@on_ranks(counts=COUNTS)
def test_asynchronous_calls_are_waited_for_by_their_events(rank: Rank) -> None:
    buffer, expected = rank.buffer(), expect(find("plain", rank.size))
    handle = checks.round_trip(buffer, expected)
    outputs = checks.output_of(buffer, expected, exported=True)
    for _ in range(20):
        result = checks.dispatch(buffer, expected, async_finish=True)
        checks.check_dispatched(waited(result), expected, rank.index)
        combined = waited(buffer.combine(outputs, handle, async_finish=True))[0]
        checks.same_bits("combined", combined, expected.combined[rank.index].combined_x)


@on_ranks(counts=COUNTS)
def test_a_call_comes_behind_the_work_of_the_callers_stream(rank: Rank) -> None:
    """Without any event: inputs that are still being written on the current stream."""
    buffer, expected = rank.buffer(), expect(find("plain", rank.size))
    for asynchronous in (False, True):
        with on(stream()):
            x = late_copy(cast(torch.Tensor, checks.payload(buffer, expected)))
            result = checks.dispatch(buffer, expected, x=x, async_finish=asynchronous)
            result = waited(result) if asynchronous else result
            checks.check_dispatched(result, expected, rank.index)
            outputs = late_copy(checks.output_of(buffer, expected, exported=False))
            made = buffer.combine(outputs, result[4], async_finish=asynchronous)
            combined = (waited(made) if asynchronous else made)[0]
            checks.same_bits("combined", combined, expected.combined[rank.index].combined_x)


@on_ranks(counts=COUNTS, choices=["caller", "comm"])
def test_previous_event_is_what_a_call_waits_for(rank: Rank, where: str) -> None:
    """The inputs are made on a stream that the caller's knows nothing of."""
    buffer, expected = rank.buffer(), expect(find("plain", rank.size))
    handle = checks.dispatch(buffer, expected)[4]
    making, own = stream(), checks.payload(buffer, expected)
    outputs = checks.output_of(buffer, expected, exported=True)
    torch.cuda.synchronize()
    options: dict[str, Any] = {"async_finish": True, "allocate_on_comm_stream": where == "comm"}
    for _ in range(5):
        with on(making):
            x = late_copy(cast(torch.Tensor, own))
            event = Buffer.capture()
        result = buffer.dispatch(x, handle=handle, previous_event=event, **options)
        result[-1].current_stream_wait()
        want: Any = expected.dispatched[rank.index].recv_x
        checks.same_payload("recv_x", result[0], want)
        with on(making):
            rows = late_copy(outputs)
            event = Buffer.capture()
        combined = waited(buffer.combine(rows, handle, previous_event=event, **options))[0]
        checks.same_bits("combined", combined, expected.combined[rank.index].combined_x)


@on_ranks(counts=COUNTS)
def test_an_event_as_context_overlaps_the_block_and_waits_at_its_end(rank: Rank) -> None:
    buffer, expected = rank.buffer(), expect(find("plain", rank.size))
    for _ in range(5):
        result = checks.dispatch(buffer, expected, async_finish=True)
        with result[-1]:
            own_work = torch.ones(64, device="cuda") * 2
        checks.check_dispatched((*result[:-1], EventOverlap()), expected, rank.index)
        assert float(own_work.sum()) == 128


@on_ranks(counts=COUNTS)
def test_memory_on_the_communication_stream_needs_both_events(rank: Rank) -> None:
    buffer, expected = rank.buffer(), expect(find("plain", rank.size))
    for options in ({"async_finish": True}, {"previous_event": Buffer.capture()}):
        with pytest.raises(ValueError, match="allocate_on_comm_stream=True with"):
            checks.dispatch(buffer, expected, allocate_on_comm_stream=True, **options)
    checks.round_trip(buffer, expected)


@on_ranks(counts=COUNTS, choices=["in_one_order", "crossed"])
def test_a_dispatch_and_a_combine_are_in_flight_on_two_streams(rank: Rank, order: str) -> None:
    """Different handles. Crossed: half of the ranks begin with the one, half with the other."""
    buffer = rank.buffer()
    sent, summed = expect(find("plain", rank.size)), expect(find("holes", rank.size))
    handles = [checks.round_trip(buffer, expected) for expected in (sent, summed)]
    x, outputs = checks.payload(buffer, sent), checks.output_of(buffer, summed, exported=True)
    biases = summed.inputs[rank.index].biases
    assert not biases
    one, other = stream(), stream()
    torch.cuda.synchronize()
    kept: list[tuple[Any, Any]] = []
    for number in range(50):
        made: dict[str, Any] = {}

        def send(made: dict[str, Any] = made) -> None:
            with on(one):
                made["x"] = buffer.dispatch(x, handle=handles[0])[0]

        def add(made: dict[str, Any] = made) -> None:
            with on(other):
                made["sums"] = buffer.combine(outputs, handles[1])[0]

        calls: list[Callable[[], None]] = [send, add]
        first = number + (rank.index if order == "crossed" else 0)
        for call in calls if first % 2 else reversed(calls):
            call()
        kept.append((made["x"], made["sums"]))
    torch.cuda.synchronize()
    for received, sums in kept:
        checks.same_payload("recv_x", received, sent.dispatched[rank.index].recv_x)
        checks.same_bits("combined", sums, summed.combined[rank.index].combined_x)


@on_ranks(counts=COUNTS)
def test_operations_of_one_kind_keep_their_order_over_streams(rank: Rank) -> None:
    """Dispatches from changing streams; each stream is busy for another time."""
    buffer, expected = rank.buffer(), expect(find("plain", rank.size))
    handle = checks.round_trip(buffer, expected)
    streams, x = [stream() for _ in range(3)], checks.payload(buffer, expected)
    torch.cuda.synchronize()
    kept = []
    for number in range(30):
        with on(streams[(number + rank.index) % 3]):
            busy(100_000 * (1 + (number + rank.index) % 4))
            kept.append(buffer.dispatch(x, handle=handle)[0])
    torch.cuda.synchronize()
    for received in kept:
        checks.same_payload("recv_x", received, expected.dispatched[rank.index].recv_x)


@on_ranks(counts=(2, 4))
def test_routing_written_just_before_layout_is_what_counts(rank: Rank) -> None:
    """D20: on a side stream: a long kernel, a masked write of -1, at once layout and dispatch."""
    buffer = rank.buffer()
    expected = expect(Case("masked", (64,) * rank.size, 64, 4 * rank.size, 2))
    mine = expected.inputs[rank.index]
    ids, x = mine.topk_idx.cuda(), cast(torch.Tensor, checks.payload(buffer, expected))
    weights, side = mine.topk_weights.cuda(), stream()
    for number in range(100):
        mask = torch.rand(ids.shape, generator=torch.Generator().manual_seed(number)) < 0.5
        want = reference.layout_reference(
            mine.topk_idx.masked_fill(mask, -1), rank.size, expected.case.num_experts
        )
        on_gpu = mask.cuda()
        side.wait_stream(torch.cuda.current_stream())
        with on(side):
            written = ids.clone()
            busy(200_000)
            written.masked_fill_(on_gpu, -1)
            layout = buffer.get_dispatch_layout(written, expected.case.num_experts)
            result = buffer.dispatch(
                x, None, layout[0], None, layout[3], layout[2], written, weights
            )
        torch.cuda.synchronize()
        checks.check_layout(layout, want)
        sent = [int(want.num_tokens_per_rank[d]) for d in range(rank.size)]
        prefix = result[4].rank_prefix_matrix
        before = prefix[rank.index - 1] if rank.index else torch.zeros_like(prefix[0])
        assert (prefix[rank.index] - before).tolist() == sent


@on_ranks(counts=(4,))
def test_torch_deterministic_mode_changes_nothing(rank: Rank) -> None:
    """D12: new memory is filled with NaN; 200 combines on a side stream under load."""
    expected: Expected = expect(find("odd_counts", rank.size))
    torch.use_deterministic_algorithms(True)
    try:
        assert bool(torch.empty(4, device="cuda").isnan().all())
        buffer, side = rank.buffer(), stream()
        handle = checks.round_trip(buffer, expected)
        outputs = checks.output_of(buffer, expected, exported=False)
        biases = expected.inputs[rank.index].biases[0].cuda()
        torch.cuda.synchronize()
        load, kept = torch.randn((512, 512), device="cuda"), []
        for _ in range(200):
            load = load / load.abs().max()
            with on(side):
                kept.append(buffer.combine(outputs, handle, bias=biases)[0])
        torch.cuda.synchronize()
    finally:
        torch.use_deterministic_algorithms(False)
    for combined in kept:
        checks.same_bits("combined", combined, expected.combined[rank.index].combined_x)
