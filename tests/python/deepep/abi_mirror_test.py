"""Numbers that Python repeats from kernels/abi/deepep_kernel.h are still the same there."""

import re
from pathlib import Path

import pytest
from deepep import errors, manifest, topology

HEADER = Path(__file__).parents[3] / "kernels" / "abi" / "deepep_kernel.h"


@pytest.fixture(scope="module")
def constants() -> dict[str, int]:
    """Every `#define NAME number` and every `NAME = number` of an enum."""
    text = HEADER.read_text()
    found = re.findall(r"^(?:#define +|\s+)(DEEPEP_\w+)(?: = | +)(\d+)\b", text, re.MULTILINE)
    return {name: int(value) for name, value in found}


def named(constants: dict[str, int], prefix: str) -> dict[str, int]:
    return {name: value for name, value in constants.items() if name.startswith(prefix)}


def test_versions_and_limits(constants: dict[str, int]) -> None:
    assert constants["DEEPEP_ABI_VERSION"] == manifest.ABI_VERSION
    assert constants["DEEPEP_MAX_RANKS"] == topology.MAX_RANKS_PER_DOMAIN


def test_status_codes(constants: dict[str, int]) -> None:
    ours = {name: value for name, value in vars(errors).items() if name.startswith("STATUS_")}
    assert len(ours) == 7
    for name, value in ours.items():
        assert constants[name.replace("STATUS_", "DEEPEP_")] == value


def test_every_operation_has_its_name(constants: dict[str, int]) -> None:
    operations = named(constants, "DEEPEP_OP_")
    assert len(operations) == constants["DEEPEP_NUM_OPS"]
    for name, value in operations.items():
        assert errors.OPERATIONS[value] == name.removeprefix("DEEPEP_OP_").lower()


def test_every_phase_has_words(constants: dict[str, int]) -> None:
    phases = named(constants, "DEEPEP_PHASE_")
    assert set(errors.PHASES) == set(phases.values())
    assert "counts" in errors.PHASES[phases["DEEPEP_PHASE_COUNTS"]]
    assert "addresses" in errors.PHASES[phases["DEEPEP_PHASE_ADDRESS"]]
    assert "closing" in errors.PHASES[phases["DEEPEP_PHASE_DONE"]]
    assert "memory" in errors.PHASES[phases["DEEPEP_PHASE_SEGMENT"]]
    assert errors.PHASES[phases["DEEPEP_PHASE_ROWS"]] == "rows"
    assert "earlier" in errors.PHASES[phases["DEEPEP_PHASE_REUSE"]]
