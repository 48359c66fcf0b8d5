"""First contact: ranks that cannot form a group are told why, and a fork harms nobody."""

import json
import os
from collections.abc import Callable

import pytest
from deepep import Buffer, UnsupportedConfigError
from deepep.testing import ThreadGroup, run_ranks

from tests.distributed import checks
from tests.distributed.cases import FAULT_CASE
from tests.distributed.checks import expect


class Elsewhere:
    """A communicator whose first exchange says that rank 1 differs in one fact."""

    def __init__(self, group: ThreadGroup, change: Callable[[dict[str, str]], None]) -> None:
        self._group, self._change = group, change
        self.rank, self.size, self.barrier = group.rank, group.size, group.barrier

    def all_gather(self, data: bytes) -> list[bytes]:
        gathered = self._group.all_gather(data)
        facts = json.loads(gathered[1])
        self._change(facts)
        return [gathered[0], json.dumps(facts).encode()]


def test_ranks_on_two_machines_are_told_what_that_needs() -> None:
    """D21"""

    def work(group: ThreadGroup) -> None:
        def move(facts: dict[str, str]) -> None:
            facts["host"] = "another machine"

        with pytest.raises(UnsupportedConfigError) as caught:
            Buffer(Elsewhere(group, move))
        text = str(caught.value)
        assert "are on several machines" in text and "another machine: ranks [1]" in text
        assert "libnvshmem_host.so.3" in text and "nvidia-nvshmem-cu13" in text

    run_ranks(2, work)


def test_ranks_of_two_versions_are_told_which() -> None:
    def work(group: ThreadGroup) -> None:
        def age(facts: dict[str, str]) -> None:
            facts["version"] = "0.0.1"

        with pytest.raises(
            UnsupportedConfigError, match=r"differ in version .*0\.0\.1: ranks \[1\]"
        ):
            Buffer(Elsewhere(group, age))

    run_ranks(2, work)


def test_a_forked_child_that_drops_the_buffer_leaves_the_parent_alone() -> None:
    def work(group: ThreadGroup) -> None:
        expected = expect(FAULT_CASE)
        with Buffer(group, timeout=20) as buffer:
            group.barrier()
            if group.rank() == 0:
                child = os.fork()
                if child == 0:
                    buffer.destroy()
                    os._exit(0)
                assert os.waitpid(child, 0)[1] == 0
            group.barrier()
            checks.round_trip(buffer, expected)
            kept = [buffer.empty(1 << 22) for _ in range(4)]  # new segments: the service is needed
            checks.round_trip(buffer, expected)
            del kept

    run_ranks(4, work)
