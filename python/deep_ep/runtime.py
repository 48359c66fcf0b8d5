"""The object behind V1's `buffer.runtime`, as far as frameworks reach into it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Runtime:
    """Facts about the group. All ranks are on one machine: one node, which is node 0.

    Args:
        device: number of the GPU; None on the CPU.
    """

    device: int | None

    def is_available(self) -> bool:
        """Whether the ranks are connected; a Buffer is, as soon as it is made."""
        return True

    def get_num_rdma_ranks(self) -> int:
        """Number of nodes."""
        return 1

    def get_rdma_rank(self) -> int:
        """Number of this rank's node."""
        return 0

    def get_root_rdma_rank(self, global_: bool) -> int:
        """The rank that V1 takes the network's identity from."""
        return 0

    def get_local_device_id(self) -> int:
        """Number of the GPU; -1 on the CPU."""
        return -1 if self.device is None else self.device
