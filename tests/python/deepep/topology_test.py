"""Expert ownership and the rules every configuration must meet."""

import pytest
from deepep.errors import UnsupportedConfigError
from deepep.topology import (
    Requirement,
    expert_owner,
    expert_range,
    num_local_experts,
)
from hypothesis import given
from hypothesis import strategies as st


@given(st.integers(1, 300), st.integers(1, 64))
def test_ranges_cover_all_experts_in_order_and_agree_with_owner(
    num_experts: int, num_ranks: int
) -> None:
    seen: list[int] = []
    for rank in range(num_ranks):
        owned = expert_range(num_experts, num_ranks, rank)
        assert num_local_experts(num_experts, num_ranks, rank) == len(owned)
        for expert in owned:
            assert expert_owner(expert, num_experts, num_ranks) == rank
        seen.extend(owned)
    assert seen == list(range(num_experts))


def test_first_ranks_hold_the_experts_that_do_not_divide() -> None:
    assert [num_local_experts(10, 4, rank) for rank in range(4)] == [3, 3, 2, 2]
    assert expert_range(10, 4, 2) == range(6, 8)


def test_ranks_without_experts_are_allowed() -> None:
    assert [num_local_experts(2, 4, rank) for rank in range(4)] == [1, 1, 0, 0]


def test_divisible_experts_split_as_in_v1() -> None:
    for expert in range(256):
        assert expert_owner(expert, 256, 8) == expert // 32


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: expert_range(8, 0, 0), "num_ranks=0"),
        (lambda: expert_range(0, 2, 0), "num_experts=0"),
        (lambda: expert_range(8, 2, 2), "rank=2"),
        (lambda: expert_owner(-1, 8, 2), "expert=-1"),
        (lambda: expert_owner(8, 8, 2), "expert=8"),
    ],
)
def test_numbers_outside_the_group_are_refused(call: object, text: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=text):
        call()


@pytest.mark.parametrize(
    ("hidden", "dtype", "row_bytes", "padded"),
    [(4, "bf16", 8, 8), (7, "bf16", 14, 8), (7, "fp8", 7, 16), (7172, "bf16", 14344, 7176)],
)
def test_row_not_a_multiple_of_16_bytes_is_refused_in_words(
    hidden: int, dtype: str, row_bytes: int, padded: int
) -> None:
    # D03
    requirement = Requirement("intranode", "host", hidden, dtype, 4)  # type: ignore[arg-type]
    with pytest.raises(ValueError) as caught:
        requirement.check()
    text = str(caught.value)
    assert f"rows of {row_bytes} bytes" in text
    assert "multiple of 16 bytes" in text
    assert f"Pad hidden to {padded}" in text


@pytest.mark.parametrize("hidden", [8, 2880, 3584, 5120, 7168, 7176, 8192])
def test_any_row_that_is_a_multiple_of_16_bytes_is_allowed(hidden: int) -> None:
    Requirement("intranode", "host", hidden, "bf16", 1).check()


@pytest.mark.parametrize(
    ("requirement", "text"),
    [
        (Requirement("intranode", "host", 0, "bf16", 4), "hidden=0"),
        (Requirement("intranode", "host", 1 << 21, "bf16", 4), "1048576"),
        (Requirement("intranode", "host", 512, "bf16", 0), "1..64"),
        (Requirement("intranode", "host", 512, "bf16", 65), "1..64"),
        (Requirement("intranode", "host", 512, "bf16", 8, 2), "num_nodes=2"),
        (Requirement("internode", "host", 512, "bf16", 8, 1), "num_nodes=1"),
        (Requirement("internode", "host", 512, "bf16", 9, 2), "same number"),
        (Requirement("internode", "host", 512, "bf16", 130, 2), "65"),
    ],
)
def test_ranks_and_sizes_outside_the_limits_are_refused(
    requirement: Requirement, text: str
) -> None:
    with pytest.raises(UnsupportedConfigError, match=text):
        requirement.check()


def test_requirement_names_the_variant_made_for_it() -> None:
    one_node = Requirement("intranode", "sm90", 7168, "fp8", 8)
    assert one_node.variant_name == "intranode_sm90_h7168_fp8_r8"
    four_nodes = Requirement("internode", "sm90", 7168, "bf16", 32, 4)
    assert four_nodes.variant_name == "internode_sm90_h7168_bf16_r8x4"
    four_nodes.check()
