"""Measures one call on one rank, in the ways that performance.md explains."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tools.bench.ranks import Ranks

Call = Callable[[], object]

GRAPH_CALLS = 4
"""Calls in one CUDA graph, so that the time between two replays counts less."""


@dataclass
class Samples:
    """Microseconds of one rank.

    Attributes:
        together: of each iteration, all ranks having started it at the same moment.
        free: of each iteration, no rank waiting for another in between (V1's way).
        host: from the call until it returns, device idle before.
        back_to_back: of one call, of many in a row with nothing in between.
    """

    together: list[float] = field(default_factory=list)
    free: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    back_to_back: float = 0.0


class Stopwatch:
    """Time between start and stop: on the device's stream, or of the clock where there is none."""

    def __init__(self, is_cuda: bool) -> None:
        self._events: list[Any] = []
        self._begin = 0
        if is_cuda:
            cuda: Any = torch.cuda
            self._events = [cuda.Event(enable_timing=True) for _ in range(2)]

    def start(self) -> None:
        if self._events:
            self._events[0].record()
        else:
            self._begin = time.perf_counter_ns()

    def stop(self) -> float:
        """Microseconds since start, when the device has done all since then."""
        if not self._events:
            return (time.perf_counter_ns() - self._begin) / 1e3
        self._events[1].record()
        torch.cuda.synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) * 1e3


def together(ranks: Ranks, call: Call, iterations: int, warmup: int) -> list[float]:
    """Microseconds of each iteration; all ranks start each one at the same moment."""
    watch = Stopwatch(ranks.is_cuda)
    for _ in range(warmup):
        call()
    times = []
    for _ in range(iterations):
        ranks.synchronize()
        ranks.start_together()
        watch.start()
        result = call()
        times.append(watch.stop())
        del result
    return times


def measure(ranks: Ranks, call: Call, iterations: int, warmup: int) -> Samples:
    """All that Samples has."""
    samples = Samples(together=together(ranks, call, iterations, warmup))
    watch = Stopwatch(ranks.is_cuda)
    ranks.start_together()
    for _ in range(iterations):
        watch.start()
        begin = time.perf_counter_ns()
        result = call()
        samples.host.append((time.perf_counter_ns() - begin) / 1e3)
        samples.free.append(watch.stop())
        del result
    ranks.start_together()
    watch.start()
    for _ in range(iterations):
        call()
    samples.back_to_back = watch.stop() / iterations
    return samples


def phases(
    ranks: Ranks, steps: Sequence[tuple[str, Call]], iterations: int, warmup: int
) -> dict[str, list[float]]:
    """Microseconds of each step in each iteration; before each, all ranks have done the last one.

    Steps follow each other as a cycle does: a later one needs what an earlier one left.
    """
    watch = Stopwatch(ranks.is_cuda)
    times: dict[str, list[float]] = {name: [] for name, _ in steps}
    for iteration in range(warmup + iterations):
        for name, call in steps:
            ranks.synchronize()
            ranks.start_together()
            watch.start()
            call()
            took = watch.stop()
            if iteration >= warmup:
                times[name].append(took)
    return times


def replayed(ranks: Ranks, call: Call, iterations: int) -> float:
    """Microseconds of one call among replays of a CUDA graph, without a pause; no host is in it.

    The call must have been made before.
    """
    cuda: Any = torch.cuda
    ranks.synchronize()
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        results = [call() for _ in range(GRAPH_CALLS)]
    ranks.start_together()
    graph.replay()
    ranks.synchronize()
    watch = Stopwatch(True)
    ranks.start_together()
    watch.start()
    for _ in range(iterations):
        graph.replay()
    took = watch.stop() / iterations / GRAPH_CALLS
    ranks.start_together()  # nobody frees what a peer may still reach
    del results, graph
    return took


def kernel_times(ranks: Ranks, call: Call, iterations: int, warmup: int) -> dict[str, float]:
    """Microseconds that each kernel of the call runs, by torch.profiler; empty if it sees none.

    The profiler slows the host down, so nothing else is measured in a process that used it.
    """
    from torch.profiler import ProfilerActivity, profile

    for _ in range(warmup):
        call()
    ranks.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(iterations):
            ranks.start_together()
            call()
            ranks.synchronize()
    found: dict[str, float] = {}
    for event in profiler.key_averages():
        total = float(getattr(event, "self_device_time_total", 0.0))
        if total > 0:
            found[event.key] = round(total / iterations, 2)
    return found
