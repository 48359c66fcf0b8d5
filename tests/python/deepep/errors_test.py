"""Exception classes, and the words made of fault records."""

import pickle
from types import SimpleNamespace

import pytest
from deepep import errors
from deepep.errors import Signature

TIMEOUT = {
    "code": errors.STATUS_TIMEOUT,
    "op": 1,
    "phase": 2,
    "rank": 0,
    "epoch": 7,
    "peers": 0b1100,
    "expected": 7,
    "seen": 6,
}


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (errors.UnsupportedConfigError, ValueError),
        (errors.KernelLoadError, ImportError),
        (errors.BufferStateError, RuntimeError),
        (errors.CommTimeoutError, TimeoutError),
        (errors.RankMismatchError, RuntimeError),
        (errors.CapacityError, ValueError),
        (errors.KernelError, RuntimeError),
    ],
)
def test_every_error_is_also_the_builtin_a_caller_expects(
    cls: type[Exception], builtin: type[Exception]
) -> None:
    assert issubclass(cls, errors.DeepEPError)
    assert issubclass(cls, builtin)
    assert str(cls("words")) == "words"


@pytest.mark.parametrize("record", [TIMEOUT, SimpleNamespace(**TIMEOUT)], ids=["mapping", "object"])
def test_timeout_names_operation_sequence_ranks_and_cure(record: object) -> None:
    error = errors.from_fault(record, timeout_s=2.0)
    assert isinstance(error, errors.CommTimeoutError)
    assert error.operation == "dispatch"
    assert error.sequence == 7
    assert error.rank == 0
    assert error.missing_ranks == (2, 3)
    assert error.phase == "tensor addresses"
    assert (error.expected, error.seen) == (7, 6)
    text = str(error)
    for part in (
        "dispatch #7 on rank 0",
        "ranks 2, 3",
        "within 2 s",
        "timeout=",
        "DEEPEP_TIMEOUT",
        "reset()",
        "alive",
    ):
        assert part in text


def test_a_rank_that_came_too_late_is_told_so() -> None:
    error = errors.from_fault({**TIMEOUT, "seen": errors.WITHDRAWN}, timeout_s=2.0)
    assert isinstance(error, errors.CommTimeoutError) and error.missing_ranks == (2, 3)
    for part in ("dispatch #7 on rank 0", "too late", "ranks 2, 3", "DEEPEP_TIMEOUT", "reset()"):
        assert part in str(error)
    assert "alive" not in str(error)


def test_timeout_error_survives_pickling_with_its_attributes() -> None:
    error = errors.from_fault(TIMEOUT)
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, errors.CommTimeoutError)
    assert str(copy) == str(error)
    assert copy.missing_ranks == (2, 3)
    assert copy.sequence == 7


def test_every_phase_and_operation_of_the_abi_has_words() -> None:
    for phase in range(5):
        for op in range(3):
            text = str(errors.from_fault({**TIMEOUT, "phase": phase, "op": op}))
            assert errors.PHASES[phase] in text
            assert errors.OPERATIONS[op] in text


def test_unknown_codes_of_newer_libraries_do_not_break_the_report() -> None:
    text = str(errors.from_fault({**TIMEOUT, "phase": 99, "op": 42}))
    assert "phase 99" in text
    assert "operation 42" in text


def test_signature_layout_is_the_one_the_kernels_pack() -> None:
    signature = Signature(14336, 56, 8, "int64", 256)
    packed = 14336 | 56 << 24 | 8 << 38 | 2 << 44 | 256 << 46
    assert errors.encode_signature(signature) == packed
    assert errors.decode_signature(packed) == signature


def test_signature_fields_use_all_their_bits() -> None:
    largest = Signature((1 << 24) - 1, (1 << 14) - 1, 63, "unknown", (1 << 18) - 1)
    assert errors.encode_signature(largest) == (1 << 64) - 1
    assert errors.decode_signature((1 << 64) - 1) == largest
    with pytest.raises(ValueError, match="num_topk=64"):
        errors.encode_signature(largest._replace(num_topk=64))


def test_mismatch_names_only_the_fields_that_differ() -> None:
    mine = Signature(14336, 0, 8, "int64", 256)
    theirs = mine._replace(num_topk=6, index_type="int32")
    error = errors.from_fault(
        {
            **TIMEOUT,
            "code": errors.STATUS_MISMATCH,
            "peers": 1 << 5,
            "expected": errors.encode_signature(mine),
            "seen": errors.encode_signature(theirs),
        }
    )
    assert isinstance(error, errors.RankMismatchError)
    text = str(error)
    assert "rank 5" in text
    assert "num_topk is 8 here and 6 there" in text
    assert "index_type is int64 here and int32 there" in text
    assert "row_bytes is" not in text
    assert "num_experts is" not in text


def test_capacity_fault_gives_both_numbers() -> None:
    record = {**TIMEOUT, "code": errors.STATUS_CAPACITY, "expected": 128, "seen": 129}
    error = errors.from_fault(record)
    assert isinstance(error, errors.CapacityError)
    assert "129 rows arrive" in str(error)
    assert "holds 128" in str(error)


def test_counts_that_contradict_the_flags_are_told_in_numbers() -> None:
    record = {**TIMEOUT, "code": errors.STATUS_INVALID_ARGUMENT, "op": 0, "peers": 0b100}
    error = errors.from_fault({**record, "expected": 9, "seen": 8})
    assert isinstance(error, errors.KernelError)
    assert "notify #7 on rank 0: num_tokens_per_rank says 9 tokens for rank 2" in str(error)
    assert "is_token_in_rank marks 8. Take both from one get_dispatch_layout" in str(error)


def test_an_interrupted_wait_asks_for_reset() -> None:
    error = errors.from_fault({**TIMEOUT, "code": errors.STATUS_INTERRUPTED})
    assert isinstance(error, errors.BufferStateError)
    assert "was interrupted by a signal while it waited for rank" in str(error)
    assert "reset() on all ranks" in str(error)


def test_device_error_is_a_kernel_error() -> None:
    error = errors.from_fault({**TIMEOUT, "code": errors.STATUS_DEVICE_ERROR})
    assert isinstance(error, errors.KernelError)
    assert "device error" in str(error)


def test_a_record_without_fault_is_refused() -> None:
    with pytest.raises(ValueError, match="no fault"):
        errors.from_fault({**TIMEOUT, "code": 0})
