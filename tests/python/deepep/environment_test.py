"""Variables: one table, validated; unknown names are warned of; the log; what switches change."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from deepep import Buffer, environment
from deepep.environment import SWITCHES

ROOT = Path(__file__).resolve().parents[3]
HEADERS = "".join(path.read_text() for path in sorted((ROOT / "kernels" / "abi").glob("*.h")))
"""What is named alike there is a constant of the C interface."""


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable set, and nothing warned of yet."""
    for switch in SWITCHES:
        monkeypatch.delenv(switch.name, raising=False)
    monkeypatch.setattr(environment, "_checked", set())


def test_the_page_shows_the_table() -> None:
    assert environment.markdown() in (ROOT / "docs" / "environment.md").read_text()


def test_every_variable_that_the_package_names_is_in_the_table() -> None:
    """And is read through it: nobody else asks os.environ for one."""
    known = {switch.name for switch in SWITCHES}
    for path in sorted((ROOT / "python").rglob("*.py")):
        text = path.read_text()
        for name in re.findall(r"\bDEEPEP_[A-Z_]+\b", text):
            listed = name in known or name.startswith(environment.ELSEWHERE)
            assert listed or name.rstrip("_") in HEADERS, f"{path.name} names {name}"
        if path.name not in ("environment.py", "machine.py", "spawn.py", "cuda_engine.py"):
            assert "os.environ" not in text, path.name


@pytest.mark.parametrize(
    "name, text, wanted",
    [
        ("DEEPEP_TIMEOUT", "2.5", 2.5),
        ("DEEPEP_DEBUG", "1", True),
        ("DEEPEP_DEBUG", "off", False),
        ("DEEPEP_SM_UTILIZATION", "0.5", 0.5),
        ("DEEPEP_COMM_THREADS", "4", 4),
        ("DEEPEP_NVLINK_OPTIMIZE", "0", False),
        ("DEEPEP_PIN", "", ""),
        ("DEEPEP_TIMEOUT", "", 100.0),
    ],
)
def test_values_are_read(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, wanted: object
) -> None:
    monkeypatch.setenv(name, text)
    assert environment.value(name) == wanted


@pytest.mark.parametrize(
    "name, text, rule",
    [
        ("DEEPEP_DEBUG", "loud", "must be 1 or 0"),
        ("DEEPEP_SM_UTILIZATION", "0", "above 0 and up to 1"),
        ("DEEPEP_SM_UTILIZATION", "half", "must be a share above 0 and up to 1"),
        ("DEEPEP_COMM_THREADS", "0", "at least 1"),
        ("DEEPEP_TIMEOUT", "nan", "above 0 and up to 1e9"),
        ("DEEPEP_ADAPTIVE_ROUTING", "2", "must be 1 or 0"),
    ],
)
def test_nonsense_is_refused_when_a_buffer_is_made(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, rule: str
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=f"{name}='{text}': .*{rule}.*It means: "):
        Buffer(device="cpu")


def test_unknown_names_are_warned_of_once_with_the_likely_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DEEPEP_TIMEOUTS", "3")
    monkeypatch.setenv("DEEPEP_TEST_DEVICE", "cpu")  # the tests' own
    with pytest.warns(RuntimeWarning, match=r"DEEPEP_TIMEOUTS is set.*mean DEEPEP_TIMEOUT\?"):
        Buffer(device="cpu").destroy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Buffer(device="cpu").destroy()


def test_the_log_tells_what_is_chosen_and_how_long_calls_take(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DEEPEP_DEBUG", "1")
    monkeypatch.setenv("DEEPEP_COMM_THREADS", "1")
    ids = torch.tensor([[0], [1]])
    with caplog.at_level(logging.DEBUG, "deepep"), Buffer(device="cpu") as buffer:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, 2)
        buffer.dispatch(torch.ones(2, 64).bfloat16(), None, per_rank, None, in_rank, per_expert)
    text = caplog.text
    assert "DEEPEP_COMM_THREADS=1; nothing to act on" in text
    assert re.search(r"rank 0: intranode_host_hany_bf16_rany: ", text)
    assert re.search(r"rank 0: Dispatch of intranode_host_\w+, status 0, [\d.]+ us", text)
    assert re.search(r"rank 0: 2 rows; wait [\d.]+ us", text)


def test_without_it_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "deepep"), Buffer(device="cpu") as buffer:
        buffer.get_dispatch_layout(torch.tensor([[0]]), 1)
    assert caplog.text == ""


def test_the_log_goes_to_stderr_where_the_program_says_nothing() -> None:
    program = "import deepep; deepep.Buffer(device='cpu', hidden=64).destroy()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"DEEPEP_DEBUG": "1", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "intranode_host_hany_bf16_rany" in done.stderr and "deepep[" in done.stderr


def test_low_latency_rows_go_through_workspaces_when_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Same results; a workspace is needed then."""
    x, ids = torch.randn(3, 64).bfloat16(), torch.tensor([[0], [1], [1]])
    size = Buffer.get_low_latency_rdma_size_hint(4, 64, 1, 2)
    results = []
    for value in ("1", "0"):
        monkeypatch.setenv("DEEPEP_NVLINK_OPTIMIZE", value)
        with Buffer(None, 0, size, low_latency_mode=True, device="cpu") as buffer:
            rows, count, *_ = buffer.low_latency_dispatch(x, ids, 4, 2, use_fp8=False)
            results.append([rows[e, : int(count[e])] for e in range(2)])  # type: ignore[index]
    for straight, through in zip(*results, strict=True):
        assert torch.equal(straight, through)
    with (
        Buffer(None, 0, 0, low_latency_mode=True, device="cpu") as buffer,
        pytest.raises(ValueError, match=r"num_rdma_bytes"),
    ):
        buffer.low_latency_dispatch(x, ids, 4, 2, use_fp8=False)
