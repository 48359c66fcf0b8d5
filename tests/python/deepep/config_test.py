"""Config: V1's checks, V1's size formulas bit by bit, and a default for every rank count."""

import pytest
from deepep.config import (
    Config,
    Operation,
    default_combine_config,
    default_config,
    default_dispatch_config,
    v1_low_latency_size_hint,
)
from hypothesis import given
from hypothesis import strategies as st

BF16_7168 = 14336


@pytest.mark.parametrize(
    ("num_ranks", "num_sms", "dispatch_nvl", "dispatch_rdma", "combine_nvl", "combine_rdma"),
    [
        (2, 20, 83_927_552, 0, 83_927_552, 0),
        (4, 20, 167_854_976, 0, 167_854_976, 0),
        (8, 20, 335_709_824, 0, 335_709_824, 0),
        (16, 20, 377_673_984, 91_887_744, 377_673_984, 86_637_184),
        (32, 20, 377_675_264, 168_023_680, 377_675_264, 168_023_680),
        (64, 20, 377_677_824, 336_047_360, 377_677_824, 336_047_360),
        (160, 20, 944_193_024, 866_371_200, 944_193_024, 840_118_400),
        (8, 24, 402_851_712, 0, 402_851_712, 0),
        (16, 24, 453_208_704, 110_265_216, 453_208_704, 103_964_544),
        (64, 24, 453_213_312, 403_256_832, 453_213_312, 403_256_832),
    ],
)
def test_size_hints_equal_v1(
    num_ranks: int,
    num_sms: int,
    dispatch_nvl: int,
    dispatch_rdma: int,
    combine_nvl: int,
    combine_rdma: int,
) -> None:
    dispatch = default_dispatch_config(num_ranks, num_sms)
    combine = default_combine_config(num_ranks, num_sms)
    assert dispatch.get_nvl_buffer_size_hint(BF16_7168, num_ranks) == dispatch_nvl
    assert dispatch.get_rdma_buffer_size_hint(BF16_7168, num_ranks) == dispatch_rdma
    assert combine.get_nvl_buffer_size_hint(BF16_7168, num_ranks) == combine_nvl
    assert combine.get_rdma_buffer_size_hint(BF16_7168, num_ranks) == combine_rdma


@pytest.mark.parametrize(
    ("tokens", "hidden", "experts", "size"),
    [
        (128, 7168, 288, 2_146_961_792),
        (128, 7168, 256, 1_908_410_496),
        (128, 3072, 288, 920_127_872),
        (64, 4096, 128, 272_630_912),
        (16, 5120, 256, 170_395_776),
    ],
)
def test_low_latency_hint_equals_v1_for_any_rank_count(
    tokens: int, hidden: int, experts: int, size: int
) -> None:
    for num_ranks in (1, 8, 64):
        assert v1_low_latency_size_hint(tokens, hidden, num_ranks, experts) == size


def test_low_latency_hint_passes_32_bits_without_wrapping() -> None:
    # D18: 16 ranks, 448 experts, hidden 5120, caps 1840 and 2048.
    small = v1_low_latency_size_hint(1840, 5120, 16, 448)
    large = v1_low_latency_size_hint(2048, 5120, 16, 448)
    # The combine slot, 2 * 5120 + 40 * 4 bytes, is larger than the dispatch message.
    assert small == 2 * (448 * 1840 * 10400) * 2 + 2 * 1792 + 128
    assert large == 2 * (448 * 2048 * 10400) * 2 + 2 * 1792 + 128
    assert large > small > 2**32


@given(st.integers(1, 4096), st.integers(1, 16).map(lambda k: 512 * k), st.integers(1, 1024))
def test_low_latency_hint_grows_with_every_input(tokens: int, hidden: int, experts: int) -> None:
    size = v1_low_latency_size_hint(tokens, hidden, 8, experts)
    assert size % 128 == 0
    assert v1_low_latency_size_hint(tokens + 1, hidden, 8, experts) > size
    assert v1_low_latency_size_hint(tokens, hidden + 512, 8, experts) > size
    assert v1_low_latency_size_hint(tokens, hidden, 8, experts + 1) > size


@pytest.mark.parametrize("ranks_per_node", [1, 2, 4, 8])
def test_every_rank_count_has_a_valid_default(ranks_per_node: int) -> None:
    # D05. Config's own checks run when it is made.
    operations: tuple[Operation, ...] = ("dispatch", "combine")
    for num_ranks in [*range(1, 161), 192, 256, 1024]:
        num_nodes = -(-num_ranks // ranks_per_node)
        for operation in operations:
            config = default_config(operation, num_ranks, 20, ranks_per_node)
            assert config.num_sms == 20
            nvl_recv = config.num_max_nvl_chunked_recv_tokens
            if num_nodes > 1:
                assert nvl_recv % num_nodes == 0
                assert config.num_max_nvl_chunked_send_tokens <= nvl_recv // num_nodes
            assert config.get_nvl_buffer_size_hint(BF16_7168, num_ranks) > 0
            assert (config.get_rdma_buffer_size_hint(BF16_7168, num_ranks) > 0) == (num_ranks > 8)


def test_unlisted_rank_counts_take_the_next_larger_row() -> None:
    assert default_dispatch_config(1) == default_dispatch_config(2)
    assert default_dispatch_config(3) == default_dispatch_config(4)
    assert default_dispatch_config(12) == default_dispatch_config(16)
    assert default_combine_config(7) == default_combine_config(8)
    assert default_combine_config(200).num_max_nvl_chunked_send_tokens == 2


def test_listed_rank_counts_give_v1_values() -> None:
    assert default_dispatch_config(128) == Config(20, 20, 560, 12, 128)
    assert default_combine_config(144) == Config(20, 2, 720, 8, 128)


def test_rdma_receive_queue_is_rounded_up_to_whole_messages() -> None:
    assert Config(20, 6, 256, 6, 128).num_max_rdma_chunked_recv_tokens == 132
    assert Config(20, 6, 256, 20, 128).num_max_rdma_chunked_recv_tokens == 140
    assert Config(20, 6, 256, 12, 128).num_max_rdma_chunked_recv_tokens == 132


@pytest.mark.parametrize(
    ("fields", "value"),
    [
        ((-2,), "num_sms=-2"),
        ((20, 0, 256), "tokens=0"),
        ((20, 6, 0), "tokens=0"),
        ((20, 256, 256), "tokens=256"),
        ((20, 6, 256, 0, 128), "tokens=0"),
        ((20, 6, 256, 128, 0), "tokens=0"),
        ((20, 6, 256, 128, 128), "tokens=128"),
        ((20, 6, 256, 100, 128), None),
    ],
)
def test_constructor_applies_v1_rules(fields: tuple[int, ...], value: str | None) -> None:
    if value is None:
        # 128 is rounded up to 200, of which 100 is just half.
        assert Config(*fields).num_max_rdma_chunked_recv_tokens == 200
        return
    with pytest.raises(ValueError, match=value):
        Config(*fields)


def test_odd_num_sms_is_refused_between_nodes_only() -> None:
    assert Config(21).get_nvl_buffer_size_hint(BF16_7168, 8) > 0
    with pytest.raises(ValueError, match="num_sms=21"):
        Config(21).get_nvl_buffer_size_hint(BF16_7168, 16)


@pytest.mark.parametrize("num_ranks", [0, -1])
def test_no_group_has_less_than_one_rank(num_ranks: int) -> None:
    with pytest.raises(ValueError, match="num_ranks"):
        default_dispatch_config(num_ranks)
    with pytest.raises(ValueError, match="num_ranks"):
        Config().get_nvl_buffer_size_hint(BF16_7168, num_ranks)


def test_low_latency_hint_refuses_what_v1_refuses() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        v1_low_latency_size_hint(0, 7168, 8, 256)
    with pytest.raises(ValueError, match="multiple of 512"):
        v1_low_latency_size_hint(1, 4, 1, 1)
