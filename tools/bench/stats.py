"""Sums up repeated measurements. Times are microseconds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

Summary = dict[str, float]


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between neighbours; 50 is the median."""
    if not values:
        raise ValueError("a percentile needs at least one value.")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarize(values: Sequence[float]) -> Summary:
    """Median and spread."""
    return {
        "median": round(statistics.median(values), 2),
        "p10": round(percentile(values, 10), 2),
        "p90": round(percentile(values, 90), 2),
        "min": round(min(values), 2),
        "max": round(max(values), 2),
        "count": len(values),
    }


def slowest(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """For each iteration the time of the rank that took longest."""
    return [max(times) for times in zip(*by_rank, strict=True)]


def fastest(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """For each iteration the time of the rank that was done first.

    Ranks wait for each other inside of an operation, so one that began late took shorter. This is
    the operation without the time by which hosts began apart.
    """
    return [min(times) for times in zip(*by_rank, strict=True)]


def rate(num_bytes: float, microseconds: float) -> float:
    """GB/s (10^9 bytes); 0 where no time passed."""
    return num_bytes / microseconds / 1e3 if microseconds > 0 else 0.0
