"""Every case of the host tests on a GPU: equal to the reference, and to the `host` architecture."""

from typing import Any

import torch
from deepep import Buffer, pin, unpin

from tests.distributed import checks
from tests.distributed.cases import Tensors, cases_of, find, random_case
from tests.distributed.checks import Expected, expect
from tests.gpu.ranks import Rank, on_ranks

NAMES = [case.name for case in cases_of(2)]
COMPARED = ["odd_counts", "top32", "fp8_column_scales", "fp8_packed_scales", "fixed_size"]


@on_ranks(choices=NAMES)
def test_results_equal_the_reference(rank: Rank, name: str) -> None:
    checks.round_trip(rank.buffer(), expect(find(name, rank.size)))


@on_ranks(choices=[str(seed) for seed in range(12)])
def test_random_combinations_of_all_axes_equal_the_reference(rank: Rank, seed: str) -> None:
    checks.round_trip(rank.buffer(), expect(random_case(1000 + int(seed), rank.size)))


def _tensors(*values: Tensors | None) -> list[torch.Tensor]:
    flat: list[torch.Tensor] = []
    for value in values:
        flat += value if isinstance(value, tuple) else [] if value is None else [value]
    return flat


def results(buffer: Buffer, expected: Expected, device: str) -> list[torch.Tensor]:
    """All that layout, dispatch, a dispatch with its handle and combine return, on the CPU."""
    case, mine = expected.case, expected.inputs[buffer.rank]

    def to(value: Any) -> Any:
        return tuple(map(to, value)) if isinstance(value, tuple) else value.to(device)

    n = expected.received(buffer.rank)
    layout = buffer.get_dispatch_layout(to(mine.topk_idx), case.num_experts)
    x, ids, weights, counts, handle, _ = buffer.dispatch(
        to(mine.x),
        None,
        layout[0],
        None,
        layout[3],
        layout[2],
        to(mine.topk_idx),
        to(mine.topk_weights),
        expert_alignment=case.alignment,
        num_worst_tokens=0 if case.worst is None else expected.rows(buffer.rank),
    )
    again = buffer.dispatch(to(mine.x), handle=handle)[0]
    outputs = torch.zeros((expected.rows(buffer.rank), case.hidden), dtype=torch.bfloat16)
    outputs[:n] = expected.outputs[buffer.rank]
    combined, sums, _ = buffer.combine(to(outputs), handle, weights, to(mine.biases) or None)
    made = _tensors(layout[0], layout[2], layout[3], combined, sums, torch.tensor(counts))
    made += [part[:n] for part in _tensors(x, ids, weights, again, handle.recv_src_idx)]
    made += [handle.rank_prefix_matrix, handle.send_head, handle.num_recv_tokens_per_expert]
    return [tensor.cpu() for tensor in made]


@on_ranks(counts=(1, 2, 4, 8), choices=COMPARED)
def test_results_equal_those_of_the_host_architecture(rank: Rank, name: str) -> None:
    expected = expect(find(name, rank.size))
    got = results(rank.buffer(), expected, "cuda")
    with Buffer(rank.group, device="cpu", timeout=20) as buffer:
        want = results(buffer, expected, "cpu")
    for number, (mine, right) in enumerate(zip(got, want, strict=True)):
        assert mine.dtype == right.dtype and mine.shape == right.shape, number
        same = mine.contiguous().view(torch.uint8) == right.contiguous().view(torch.uint8)
        assert bool(same.all()), f"result {number} differs in {int((~same).sum())} bytes"


@on_ranks(counts=(8,))
def test_generic_and_specialised_kernels_give_the_same(rank: Rank) -> None:
    """Hidden 7168 on 8 ranks has kernels of its own; pinned, the generic ones serve."""
    expected = expect(find("cold_experts", rank.size))
    generic = f"intranode_{rank.arch}_hany_bf16_rany"
    with rank.new_buffer(hidden=expected.case.hidden) as buffer:
        assert buffer.chosen_variants()[0].startswith(f"intranode_{rank.arch}_h7168_bf16_r8")
        special = results(buffer, expected, "cuda")
    pin(generic)
    try:
        with rank.new_buffer(hidden=expected.case.hidden) as buffer:
            assert buffer.chosen_variants()[0].startswith(generic)
            for mine, other in zip(results(buffer, expected, "cuda"), special, strict=True):
                assert torch.equal(mine, other)
    finally:
        unpin()
