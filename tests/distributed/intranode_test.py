"""Dispatch and combine among ranks that are threads, over every kind of routing and shape.

D06, D07, D09, D10, D11, D13 among them; cases.py has the list.
"""

from typing import Any

import pytest
from deepep import Buffer
from deepep.testing import run_ranks

from tests.distributed import checks
from tests.distributed.cases import CASES, Case, random_case
from tests.distributed.checks import Expected, expect


def round_trip(group: Any, expected: Expected) -> None:
    with Buffer(group, timeout=20) as buffer:
        checks.round_trip(buffer, expected)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_equal_the_reference(case: Case) -> None:
    run_ranks(case.num_ranks, round_trip, expect(case))


@pytest.mark.parametrize("seed", range(60))
def test_random_combinations_of_all_axes_equal_the_reference(seed: int) -> None:
    case = random_case(seed)
    run_ranks(case.num_ranks, round_trip, expect(case))
