"""CUDA graphs: captured calls are replayed with new routing, or refused in words (D19)."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from deepep import Buffer, BufferStateError, CommTimeoutError, reference

from tests.distributed import checks
from tests.distributed.cases import Case
from tests.distributed.checks import Expected, expect
from tests.gpu.ranks import Rank, on_ranks

COUNTS = (1, 2, 8)
TOKENS, HIDDEN = 32, 512


def _case(num_ranks: int, seed: int) -> Expected:
    case = Case("graph", (TOKENS,) * num_ranks, HIDDEN, 4 * num_ranks, 2, "holes")
    return expect(replace(case, seed=seed))


class Step:
    """Layout, dispatch of a fixed size and combine, on tensors that stay where they are."""

    def __init__(self, buffer: Buffer, expected: Expected) -> None:
        self.buffer, self.experts = buffer, expected.case.num_experts
        self.capacity = TOKENS * expected.case.num_ranks
        mine = expected.inputs[buffer.rank]
        self.x, self.ids = cast(torch.Tensor, mine.x).cuda(), mine.topk_idx.cuda()
        self.weights = mine.topk_weights.cuda()

    def load(self, expected: Expected) -> None:
        mine = expected.inputs[self.buffer.rank]
        self.x.copy_(cast(torch.Tensor, mine.x))
        self.ids.copy_(mine.topk_idx)
        self.weights.copy_(mine.topk_weights)

    def __call__(self) -> tuple[Any, ...]:
        per_rank, _, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(
            self.ids, self.experts
        )
        x, ids, weights, _, handle, _ = self.buffer.dispatch(
            self.x,
            None,
            per_rank,
            None,
            in_rank,
            per_expert,
            self.ids,
            self.weights,
            num_worst_tokens=self.capacity,
        )
        combined, _, _ = self.buffer.combine(cast(torch.Tensor, x), handle)
        return x, ids, weights, combined

    def check(self, results: tuple[Any, ...], expected: Expected) -> None:
        rank, n = self.buffer.rank, expected.received(self.buffer.rank)
        want = expected.dispatched[rank]
        x, ids, weights, combined = results
        checks.same_payload("recv_x", x[:n], want.recv_x)
        checks.same_bits("recv_topk_idx", ids[:n], cast(torch.Tensor, want.recv_topk_idx))
        assert bool((ids[n:] == -1).all())
        checks.same_bits("weights", weights[:n], cast(torch.Tensor, want.recv_topk_weights))
        rows = [cast(torch.Tensor, result.recv_x) for result in expected.dispatched]
        sums = reference.combine_reference(rows, expected.dispatched)[rank].combined_x
        checks.same_bits("combined", combined, sums)


@on_ranks(counts=COUNTS, choices=["global", "thread_local"])
def test_a_captured_step_is_replayed_with_new_routing(rank: Rank, mode: str) -> None:
    """D19 b: ten replays, each with other tokens and experts."""
    chosen = [_case(rank.size, seed) for seed in range(50, 60)]
    with rank.new_buffer() as buffer:
        step = Step(buffer, chosen[0])
        for _ in range(3):
            step.check(step(), chosen[0])
        torch.cuda.synchronize()
        rank.barrier()
        graph: Any = cast(Any, torch.cuda).CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode=mode):
            results = step()
        rank.barrier()
        for expected in chosen:
            step.load(expected)
            graph.replay()
            torch.cuda.synchronize()
            step.check(results, expected)
            step.check(step(), expected)  # eager calls in between
        torch.cuda.synchronize()
        rank.barrier()
        del results, graph


@on_ranks(counts=(2,))
def test_a_replay_whose_peer_does_not_come_is_told_by_check(rank: Rank) -> None:
    """A replay raises nothing by itself; after reset() the Buffer works again."""
    expected = _case(rank.size, 3)
    with rank.new_buffer(timeout=1) as buffer:
        step, graph = Step(buffer, expected), cast(Any, torch.cuda).CUDAGraph()
        step.check(step(), expected)
        torch.cuda.synchronize()
        rank.barrier()
        with torch.cuda.graph(graph):
            results = step()
        buffer.check()
        rank.barrier()
        if rank.index == 0:
            graph.replay()
            torch.cuda.synchronize()
            with pytest.raises(CommTimeoutError, match="rank 1"):
                buffer.check()
            with pytest.raises(BufferStateError, match=r"reset\(\)"):
                buffer.check()
        rank.barrier()
        buffer.reset()
        buffer.check()
        step.check(step(), expected)
        torch.cuda.synchronize()
        rank.barrier()
        del results, graph


@on_ranks(counts=(2,))
def test_the_first_use_inside_a_capture_is_refused_and_leaves_nothing(rank: Rank) -> None:
    """D19 a: an error of our own; afterwards nothing is being captured and the Buffer works."""
    expected = _case(rank.size, 1)
    with rank.new_buffer() as buffer:
        step, graph = Step(buffer, expected), cast(Any, torch.cuda).CUDAGraph()
        with pytest.raises(BufferStateError, match="capture"), torch.cuda.graph(graph):
            step()
        assert not torch.cuda.is_current_stream_capturing()
        step.check(step(), expected)


@on_ranks(counts=(2,))
def test_a_dispatch_that_waits_for_counts_is_refused_inside_a_capture(rank: Rank) -> None:
    expected = _case(rank.size, 2)
    with rank.new_buffer() as buffer:
        step = Step(buffer, expected)
        step.check(step(), expected)
        layout = checks.layout(buffer, expected)
        torch.cuda.synchronize()
        graph = cast(Any, torch.cuda).CUDAGraph()
        with pytest.raises(BufferStateError, match="num_worst_tokens"), torch.cuda.graph(graph):
            buffer.dispatch(step.x, None, layout[0], None, layout[3], layout[2])
        assert not torch.cuda.is_current_stream_capturing()
        step.check(step(), expected)
