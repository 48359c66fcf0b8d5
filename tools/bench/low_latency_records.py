"""Measures the low-latency operations of one shape on one rank, and makes records of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tools.bench import low_latency_traffic, stats, timing, traffic
from tools.bench.low_latency import LowLatencyCalls
from tools.bench.shapes import PHASES

Record = dict[str, Any]


def records(
    calls: LowLatencyCalls,
    operations: Sequence[str],
    iterations: int,
    warmup: int,
    top: float,
) -> Iterator[Record]:
    """One for each operation, the phases last; the same on all ranks. `top`: ceiling in GB/s."""
    flow = calls.flow()
    for name in operations:
        if name not in PHASES:
            yield _record(calls, name, _whole(calls, name, iterations, warmup), flow, top)
    phases = [name for name in operations if name in PHASES]
    if phases:
        mine = timing.phases(calls.ranks, calls.steps(), iterations, warmup)
        every = calls.ranks.gather(mine)
        for name in phases:
            yield _record(calls, name, _summaries([rank[name] for rank in every]), flow, top)


def _summaries(by_rank: Sequence[Sequence[float]]) -> dict[str, Any]:
    return {
        "whole": stats.summarize(stats.slowest(by_rank)),
        "fastest": stats.summarize(stats.fastest(by_rank)),
        "rank0": stats.summarize(by_rank[0]),
    }


def _whole(calls: LowLatencyCalls, name: str, iterations: int, warmup: int) -> dict[str, Any]:
    ranks, call = calls.ranks, calls.call(name)
    samples = timing.measure(ranks, call, iterations, warmup)
    if ranks.is_cuda:
        samples.back_to_back = timing.replayed(ranks, call, iterations)
    every: list[timing.Samples] = ranks.gather(samples)
    return _summaries([item.together for item in every]) | {
        "rank0": stats.summarize(every[0].free),
        "back_to_back": round(max(item.back_to_back for item in every), 2),
        "host": stats.summarize([value for item in every for value in item.host]),
    }


def _record(
    calls: LowLatencyCalls, name: str, us: dict[str, Any], flow: traffic.Flow, top: float
) -> Record:
    shape, ranks = calls.shape, calls.ranks
    v1 = max(low_latency_traffic.v1_bytes(name, shape, flow))
    memory = low_latency_traffic.memory_bytes(name, shape, flow)
    busiest = traffic.busiest(memory, ranks.gather(ranks.index))
    shortest = us["fastest"]["median"]
    return {
        "shape": shape.as_dict(),
        "operation": name,
        "variant": calls.variant,
        "reason": calls.reason,
        "rows": {"mean": sum(flow.received) / shape.ranks, "max": max(flow.received)},
        "bytes": {"v1": v1, "memory": busiest},
        "us": us | {"floor": round(busiest / top / 1e3, 2)},
        "gb_per_s": {
            "v1": round(stats.rate(v1, shortest), 1),
            "memory": round(stats.rate(busiest, shortest), 1),
        },
        "of_ceiling": round(stats.rate(busiest, shortest) / top, 4),
    }
