"""One small interface over the process groups that a Buffer may be given.

A Buffer needs its group only to set up and to reset: ranks exchange a few bytes and meet. Data
never goes this way. Knows torch and mpi4py only by the objects it is handed.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Communicator(Protocol):
    """What a Buffer needs of a group. Any object with these four methods may be passed as `group`.

    Collective calls must be made by all ranks in the same order. An implementation raises when a
    peer is known to be gone, and must not wait for ever.
    """

    def rank(self) -> int:
        """Number of this rank, 0..size()-1."""
        ...

    def size(self) -> int:
        """Number of ranks."""
        ...

    def all_gather(self, data: bytes) -> list[bytes]:
        """Returns every rank's `data` in rank order. Lengths may differ."""
        ...

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        ...


class SelfGroup:
    """A world of one rank; needs no launcher and no network."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def all_gather(self, data: bytes) -> list[bytes]:
        return [data]

    def barrier(self) -> None:
        return None


class TorchGroup:
    """A torch process group (gloo, nccl, mpi)."""

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist

        self._group = group
        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)
        if self._rank < 0:
            raise ValueError(
                "This rank is not a member of the process group it was given. Make the Buffer only "
                "on the ranks that torch.distributed.new_group(ranks=...) lists."
            )

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def all_gather(self, data: bytes) -> list[bytes]:
        import torch.distributed as dist

        # all_gather_object places its tensors on the device that the backend needs.
        gathered: list[Any] = [None] * self._size
        dist.all_gather_object(gathered, data, group=self._group)
        return [bytes(item) for item in gathered]

    def barrier(self) -> None:
        # Not dist.barrier(): on nccl that guesses a device, and warns about it.
        self.all_gather(b"")


class MpiGroup:
    """An mpi4py communicator."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def rank(self) -> int:
        return int(self._comm.Get_rank())

    def size(self) -> int:
        return int(self._comm.Get_size())

    def all_gather(self, data: bytes) -> list[bytes]:
        return [bytes(item) for item in self._comm.allgather(data)]

    def barrier(self) -> None:
        self._comm.allgather(b"")


_COMMUNICATOR_METHODS = ("rank", "size", "all_gather", "barrier")
_MPI_METHODS = ("Get_rank", "Get_size", "allgather")


def _has_methods(value: object, names: tuple[str, ...]) -> bool:
    return all(callable(getattr(value, name, None)) for name in names)


def _is_torch_group(value: object) -> bool:
    # Who holds a process group has imported torch.distributed; never import it only to ask.
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available():
        return False
    return isinstance(value, dist.ProcessGroup)


def wrap(group: object = None, comm: object = None) -> Communicator:
    """Makes a Communicator of what the user passed to Buffer.

    Args:
        group: a torch process group, or any object with the methods of Communicator, or None.
        comm: an mpi4py communicator, used when `group` is None; it may also be passed as `group`.
            With neither, the world is this one rank.

    Raises:
        TypeError: the object is none of these kinds.
        ValueError: both were given, or this rank is not a member of the torch group.
    """
    if group is not None and comm is not None:
        raise ValueError("Both group and comm were given; pass one of them.")
    given = group if group is not None else comm
    if given is None:
        return SelfGroup()
    if _is_torch_group(given):
        return TorchGroup(given)
    if isinstance(given, Communicator) and _has_methods(given, _COMMUNICATOR_METHODS):
        return given
    if _has_methods(given, _MPI_METHODS):
        return MpiGroup(given)
    dist: Any = sys.modules.get("torch.distributed")
    outside = getattr(getattr(dist, "GroupMember", None), "NON_GROUP_MEMBER", None)
    if outside is not None and given is outside:
        raise ValueError(
            "This rank is not a member of the process group: new_group() returned NON_GROUP_MEMBER "
            "here. Make the Buffer only on the ranks of the group."
        )
    is_mesh = _has_methods(given, ("get_group",))
    hint = " A DeviceMesh is not a group: pass mesh.get_group()." if is_mesh else ""
    raise TypeError(
        f"group is a {type(given).__module__}.{type(given).__qualname__}; accepted are a "
        "torch.distributed.ProcessGroup, an mpi4py communicator, an object with the methods "
        f"{', '.join(_COMMUNICATOR_METHODS)}, or None for a world of one rank.{hint}"
    )
