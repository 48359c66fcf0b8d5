"""The first contact of a group's ranks: who they are, and that they can reach each other.

Knows no torch. Every function is collective: all ranks get the same answer, or all raise.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable

from deepep.errors import UnsupportedConfigError
from deepep.groups import Communicator

Facts = dict[str, str]
"""What one rank tells about itself."""

_MUST_AGREE = (
    ("version", "install the same version of deepep on all ranks"),
    ("arch", "give all ranks the same device="),
    ("ranks_per_node", "give all ranks the same ranks_per_node="),
)


def host_identity() -> str:
    """The same on all processes, in any container, of one running machine."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return os.uname().nodename


def exchange(comm: Communicator, mine: Facts) -> list[Facts]:
    """Every rank's facts, in rank order."""
    return [json.loads(item) for item in comm.all_gather(json.dumps(mine).encode())]


def check_alike(peers: list[Facts]) -> None:
    """Raises UnsupportedConfigError where ranks differ in what must be the same."""
    for fact, cure in _MUST_AGREE:
        values = [peer[fact] for peer in peers]
        if len(set(values)) > 1:
            listed = "; ".join(
                f"{value}: ranks {[r for r, v in enumerate(values) if v == value]}"
                for value in sorted(set(values))
            )
            raise UnsupportedConfigError(
                f"The ranks of the group differ in {fact} ({listed}); {cure}."
            )


def open_all(comm: Communicator, connect: Callable[[], None], where: str = "") -> None:
    """Opens the peers' memory. Nobody goes on before all have; so none can be gone by then.

    Args:
        connect: does it for this rank; its RuntimeError or ValueError is told to all.
        where: for the message.

    Raises:
        UnsupportedConfigError: some rank could not.
    """
    failure = ""
    try:
        connect()
    except (RuntimeError, ValueError) as error:
        failure = str(error)
    failures = [item.decode() for item in comm.all_gather(failure.encode())]
    failed = [rank for rank, text in enumerate(failures) if text]
    if failed:
        raise UnsupportedConfigError(
            f"Ranks {failed} of {len(failures)} cannot reach their peers' memory{where}; rank "
            f"{failed[0]} says: {failures[failed[0]]}."
        )
