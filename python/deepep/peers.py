"""Which GPUs can form one memory domain: every pair must reach each other's memory.

Knows no driver: the pairs are given, by the doctor or by whoever asked the driver.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from deepep.errors import UnsupportedConfigError

Pair = tuple[int, int]


def missing_pairs(devices: Sequence[int], reachable: Collection[Pair]) -> list[Pair]:
    """The pairs among `devices` that are not in `reachable`, which has each pair in any order."""
    return [
        (first, second)
        for position, first in enumerate(devices)
        for second in devices[position + 1 :]
        if (first, second) not in reachable and (second, first) not in reachable
    ]


def largest_domain(devices: Sequence[int], reachable: Collection[Pair]) -> tuple[int, ...]:
    """The most devices that all reach each other; of several such sets the first in order."""
    best: tuple[int, ...] = ()

    def grow(chosen: tuple[int, ...], rest: Sequence[int]) -> None:
        nonlocal best
        if len(chosen) > len(best):
            best = chosen
        for position, device in enumerate(rest):
            if len(chosen) + len(rest) - position <= len(best):
                return
            after = rest[position + 1 :]
            joined = [other for other in after if not missing_pairs((device, other), reachable)]
            grow((*chosen, device), joined)

    grow((), devices)
    return best


def check_domain(num_ranks: int, devices: Sequence[int], reachable: Collection[Pair]) -> None:
    """Refuses a domain of `num_ranks` ranks, one on each GPU, that these devices cannot form.

    Raises:
        UnsupportedConfigError: there are fewer devices, or some pairs lack access; the text lists
            the pairs and the largest domain that is possible.
    """
    if num_ranks > len(devices):
        raise UnsupportedConfigError(
            f"num_ranks={num_ranks} in one memory domain, but this machine has {len(devices)} "
            "GPUs, and each rank needs its own. Use fewer ranks, or several nodes."
        )
    best = largest_domain(devices, reachable)
    if len(best) < num_ranks:
        missing = ", ".join(map(str, missing_pairs(devices[:num_ranks], reachable)))
        raise UnsupportedConfigError(
            f"num_ranks={num_ranks} in one memory domain, but these pairs of GPUs cannot reach "
            f"each other's memory: {missing}. The largest domain here is "
            f"{len(best)} ranks, on GPUs {', '.join(map(str, best))}: use "
            f"CUDA_VISIBLE_DEVICES={','.join(map(str, best))} and a group of {len(best)}, or look "
            "for what keeps the others apart (nvidia-smi topo -p2p r; IOMMU, ACS, MIG)."
        )


@dataclass(frozen=True, slots=True)
class Reach:
    """What one rank knows of GPUs, each by its UUID.

    Attributes:
        own: the one that it works on.
        seen: those that its process can see, in the order of their numbers.
        reached: of these, the ones whose memory its own can reach.
    """

    own: str
    seen: tuple[str, ...]
    reached: tuple[str, ...]

    def cannot_reach(self, device: str) -> bool:
        """Whether it is known that `device` is out of reach; of unseen ones nothing is known."""
        return device != self.own and device in self.seen and device not in self.reached


def check_ranks(ranks: Sequence[Reach]) -> None:
    """Refuses ranks whose GPUs cannot all reach each other's memory, before anything is opened.

    Raises:
        UnsupportedConfigError: as check_domain; where ranks see different devices, with the pairs
            of ranks.
    """
    apart = [
        (first, second)
        for first in range(len(ranks))
        for second in range(first + 1, len(ranks))
        if ranks[first].cannot_reach(ranks[second].own)
        or ranks[second].cannot_reach(ranks[first].own)
    ]
    if not apart:
        return
    devices = {rank.own for rank in ranks}
    if len({rank.seen for rank in ranks}) == 1 and len(devices) == len(ranks):
        numbers = [ranks[0].seen.index(rank.own) for rank in ranks]
        far = {(numbers[a], numbers[b]) for a, b in apart} | {
            (numbers[b], numbers[a]) for a, b in apart
        }
        near = [(a, b) for a in numbers for b in numbers if a != b and (a, b) not in far]
        check_domain(len(ranks), numbers, near)
    raise UnsupportedConfigError(
        f"The GPUs of these pairs of ranks cannot reach each other's memory: "
        f"{', '.join(map(str, apart))}. Run only ranks in one group whose GPUs all can, or look "
        "for what keeps the others apart (nvidia-smi topo -p2p r; IOMMU, ACS, MIG)."
    )
