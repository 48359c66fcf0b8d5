"""wrap(): which groups a Buffer accepts, and how it refuses others."""

import pytest
from deepep.groups import Communicator, MpiGroup, SelfGroup, TorchGroup, wrap
from deepep.testing import ThreadGroup, run_processes, run_ranks


class FakeMpi:
    """The part of mpi4py.MPI.Comm that is used; two ranks, this one is rank 1."""

    def Get_rank(self) -> int:  # noqa: N802
        return 1

    def Get_size(self) -> int:  # noqa: N802
        return 2

    def allgather(self, data: bytes) -> list[bytes]:
        return [b"zero", data]


class OwnGroup:
    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def all_gather(self, data: bytes) -> list[bytes]:
        return [data]

    def barrier(self) -> None:
        return None


class Mesh:
    def get_group(self) -> None:
        return None


def test_no_group_is_a_world_of_one() -> None:
    group = wrap()
    assert isinstance(group, SelfGroup)
    assert (group.rank(), group.size()) == (0, 1)
    assert group.all_gather(b"x") == [b"x"]
    group.barrier()


@pytest.mark.parametrize("keyword", ["group", "comm"])
def test_mpi_communicators_are_taken_under_either_name(keyword: str) -> None:
    group = wrap(**{keyword: FakeMpi()})
    assert isinstance(group, MpiGroup)
    assert isinstance(group, Communicator)
    assert (group.rank(), group.size()) == (1, 2)
    assert group.all_gather(b"one") == [b"zero", b"one"]
    group.barrier()


def test_objects_with_the_four_methods_are_taken_as_they_are() -> None:
    own = OwnGroup()
    assert wrap(own) is own


def test_two_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="Both group and comm"):
        wrap(OwnGroup(), FakeMpi())


def test_other_objects_are_refused_naming_the_accepted_kinds() -> None:
    with pytest.raises(TypeError) as caught:
        wrap(object())
    text = str(caught.value)
    for part in ("builtins.object", "ProcessGroup", "mpi4py", "all_gather", "None"):
        assert part in text
    with pytest.raises(TypeError, match=r"mesh\.get_group\(\)"):
        wrap(Mesh())


def gather_in_torch(group: object) -> tuple[int, int, list[bytes]]:
    wrapped = wrap(group)
    assert isinstance(wrapped, TorchGroup)
    wrapped.barrier()
    return wrapped.rank(), wrapped.size(), wrapped.all_gather(b"r" * (wrapped.rank() + 1))


def test_torch_groups_gather_bytes_of_different_lengths() -> None:
    results = run_processes(2, gather_in_torch)
    assert results == [(0, 2, [b"r", b"rr"]), (1, 2, [b"r", b"rr"])]


def gather_in_subgroup(group: object) -> str:
    import torch.distributed as dist

    pair = dist.new_group(ranks=[0, 2])
    try:
        wrapped = wrap(pair)
    except ValueError as error:
        return str(error)
    return f"{wrapped.rank()} of {wrapped.size()}: {wrapped.all_gather(b'x')}"


def test_subgroups_count_their_own_ranks_and_refuse_outsiders() -> None:
    first, outside, second = run_processes(3, gather_in_subgroup)
    assert first == "0 of 2: [b'x', b'x']"
    assert second == "1 of 2: [b'x', b'x']"
    assert "not a member" in outside


def test_thread_groups_are_communicators() -> None:
    def work(group: ThreadGroup) -> tuple[int, list[bytes]]:
        wrapped = wrap(group)
        return wrapped.rank(), wrapped.all_gather(bytes([wrapped.rank()]))

    results = run_ranks(5, work)
    assert results == [(rank, [bytes([r]) for r in range(5)]) for rank in range(5)]
