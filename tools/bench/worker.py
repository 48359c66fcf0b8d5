"""What each rank does: every shape, every operation; rank 0 makes the records of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepep.errors import UnsupportedConfigError
from tqdm import tqdm  # type: ignore[import-untyped]

from tools.bench import low_latency_records, stats, timing, traffic
from tools.bench.calls import Calls
from tools.bench.low_latency import LowLatencyCalls
from tools.bench.ranks import Ranks
from tools.bench.shapes import PHASES, Shape

COPY_BYTES = {"cuda": 512 << 20, "cpu": 64 << 20}
"""Of each rank's copy for the ceiling: far more than any cache holds."""

Record = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """What is the same for all shapes."""

    device: str = "cuda"
    operations: tuple[str, ...] = ()
    iterations: int = 30
    warmup: int = 5
    seed: int = 0
    progress: bool = True


def copy_time(ranks: Ranks, num_bytes: int, options: Options) -> float:
    """Microseconds that all ranks take to copy so many bytes each; the median."""
    times = timing.together(
        ranks, ranks.copier(max(1, num_bytes)), options.iterations, options.warmup
    )
    return stats.summarize(stats.slowest(ranks.gather(times)))["median"]


def ceiling(ranks: Ranks, options: Options) -> float:
    """GB/s (read plus written) at which one device copies its own memory: the most that was seen.

    Copies are made by all ranks at once and, on a GPU, by the first rank of each device alone.
    """
    size = COPY_BYTES[options.device]
    devices = ranks.gather(ranks.index)
    sharing = devices.count(devices[0])
    found = stats.rate(2 * size * sharing, copy_time(ranks, size, options))
    if ranks.is_cuda and sharing > 1:
        first = devices.index(ranks.index) == ranks.rank
        call: timing.Call = ranks.copier(size) if first else lambda: None
        times = timing.together(ranks, call, options.iterations, options.warmup)
        slowest = stats.slowest(ranks.gather(times))
        found = max(found, stats.rate(2 * size, stats.summarize(slowest)["median"]))
    return round(found, 1)


def _record(
    ranks: Ranks, calls: Calls, operation: str, flow: traffic.Flow, top: float, options: Options
) -> Record:
    """One operation of one shape; the same on all ranks."""
    samples = timing.measure(ranks, calls.call(operation), options.iterations, options.warmup)
    every: list[timing.Samples] = ranks.gather(samples)
    shape = calls.shape
    whole = stats.summarize(stats.slowest([item.together for item in every]))
    v1 = 0 if operation == "layout" else max(traffic.v1_bytes(shape, flow))
    memory = traffic.memory_bytes(operation, shape, flow, calls.capacity)
    busiest = traffic.busiest(memory, ranks.gather(ranks.index))
    return {
        "shape": shape.as_dict(),
        "operation": operation,
        "variant": calls.variant,
        "reason": calls.reason,
        "rows": {"mean": sum(flow.received) / shape.ranks, "max": max(flow.received)},
        "bytes": {"v1": v1, "memory": busiest},
        "us": {
            "whole": whole,
            "rank0": stats.summarize(every[0].free),
            "back_to_back": round(max(item.back_to_back for item in every), 2),
            "host": stats.summarize([value for item in every for value in item.host]),
        },
        "gb_per_s": {
            "v1": round(stats.rate(v1, whole["median"]), 1),
            "memory": round(stats.rate(busiest, whole["median"]), 1),
        },
        "of_ceiling": round(stats.rate(busiest, whole["median"]) / top, 4),
    }


def _memcpy(ranks: Ranks, flow: traffic.Flow, shape: Shape, options: Options) -> float:
    """How long plain memcpy of the bytes that each rank receives takes, on all ranks at once."""
    return copy_time(ranks, traffic.v1_bytes(shape, flow)[ranks.rank], options)


def _bar(ranks: Ranks, shapes: Sequence[Shape], options: Options, what: str) -> Any:
    total = sum(len(chosen(shape, options)) for shape in shapes)
    hidden = ranks.rank > 0 or not options.progress
    return tqdm(total=total, desc=f"{what}, {ranks.size} ranks", disable=hidden, file=sys.stderr)


def chosen(shape: Shape, options: Options) -> list[str]:
    """The operations that are measured of a shape."""
    return [name for name in shape.operations if name in (options.operations or shape.operations)]


def _calls(ranks: Ranks, shape: Shape, options: Options) -> Calls | LowLatencyCalls:
    kind = Calls if shape.mode == "normal" else LowLatencyCalls
    return kind(ranks, shape, options.seed)


def of_shape(ranks: Ranks, shape: Shape, top: float, options: Options) -> Iterator[Record]:
    """The operations of one shape, one after the other; the same on all ranks."""
    try:
        calls = _calls(ranks, shape, options)
    except UnsupportedConfigError as error:
        # On all ranks alike; the next shape may have a library.
        yield {"shape": shape.as_dict(), "error": str(error)}
        return
    names = chosen(shape, options)
    if isinstance(calls, LowLatencyCalls):
        count = options.iterations, options.warmup
        yield from low_latency_records.records(calls, names, *count, top)
        calls.close()
        return
    flow = calls.flow()
    plain = 0.0 if ranks.is_cuda else _memcpy(ranks, flow, shape, options)
    for operation in names:
        record = _record(ranks, calls, operation, flow, top, options)
        if plain and operation != "layout":
            record["us"]["memcpy"] = plain
            record["of_memcpy"] = round(record["us"]["whole"]["median"] / plain, 3)
        yield record
    calls.close()


def run(group: Any, shapes: Sequence[Shape], options: Options) -> dict[str, Any]:
    """Measures all shapes; every rank returns the same records and ceiling."""
    torch.manual_seed(options.seed)
    ranks = Ranks(group, options.device)
    top = ceiling(ranks, options)
    records: list[Record] = []
    with _bar(ranks, shapes, options, "measuring") as bar:
        for shape in shapes:
            for record in of_shape(ranks, shape, top, options):
                records.append(record)
                bar.update(len(chosen(shape, options)) if "error" in record else 1)
    return {"records": records, "ceiling_gb_per_s": top}


def profile(group: Any, shapes: Sequence[Shape], options: Options) -> list[Record]:
    """The kernels' own times, for processes of their own."""
    ranks = Ranks(group, options.device)
    found: list[Record] = []
    with _bar(ranks, shapes, options, "profiling") as bar:
        for shape in shapes:
            try:
                calls = _calls(ranks, shape, options)
            except UnsupportedConfigError:
                continue
            for operation in chosen(shape, options):
                if operation in PHASES:  # one cannot be called without the one before it
                    bar.update()
                    continue
                mine = timing.kernel_times(
                    ranks, calls.call(operation), options.iterations, options.warmup
                )
                every = ranks.gather(mine)
                names = {name for times in every for name in times}
                kernels = {n: max(times.get(n, 0.0) for times in every) for n in sorted(names)}
                found.append({"shape": shape.as_dict(), "operation": operation, "us": kernels})
                bar.update()
            calls.close()
    return found
