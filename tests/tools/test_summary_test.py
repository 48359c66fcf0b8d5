"""The closing line of a test run: what counts as passed, failed or skipped."""

import json
import pathlib
from typing import Any

import pytest

from tools import test_summary

CASES = """<testsuites><testsuite>
<testcase classname="a" name="passes"/>
<testcase classname="a" name="skips"><skipped/></testcase>
{more}
</testsuite></testsuites>"""
FAILURE = '<testcase classname="a" name="fails"><failure/></testcase>'


def result(folder: pathlib.Path, status: str, xml: str | None) -> dict[str, Any]:
    """A testResult event whose test.xml holds `xml`; None: the file is missing."""
    path = folder / "a b" / "test.xml"
    path.parent.mkdir(exist_ok=True)
    if xml is not None:
        path.write_text(xml)
    output = {"name": "test.xml", "uri": path.as_uri()}
    return {
        "id": {"testResult": {"label": "//tests:a"}},
        "testResult": {"status": status, "testActionOutput": [output]},
    }


def summary(
    folder: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *events: dict[str, Any],
    bazel_exit: int,
) -> tuple[int, str]:
    """Exit code and last line for these events."""
    path = folder / "events.json"
    path.write_text("".join(json.dumps(event) + "\n" for event in events) + '{"cut')
    monkeypatch.setattr("sys.argv", ["test_summary.py", str(path), str(bazel_exit)])
    code = test_summary.main()
    return code, capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("status", "xml", "bazel_exit", "expected"),
    [
        ("PASSED", CASES.format(more=""), 0, (0, "1 passed, 0 failed, 1 skipped")),
        ("FAILED", CASES.format(more=FAILURE), 3, (1, "1 passed, 1 failed, 1 skipped")),
        ("PASSED", None, 0, (0, "1 passed, 0 failed, 0 skipped")),
        ("TIMEOUT", None, 3, (1, "0 passed, 1 failed, 0 skipped")),
        ("TIMEOUT", CASES.format(more=""), 3, (1, "1 passed, 1 failed, 1 skipped")),
        ("PASSED", CASES.format(more=""), 37, (1, "1 passed, 1 failed, 1 skipped")),
    ],
    ids=["passes", "fails", "no xml", "timeout", "timeout with cases", "bazel crashed"],
)
def test_counts_cases_and_trusts_bazel(
    status: str,
    xml: str | None,
    bazel_exit: int,
    expected: tuple[int, str],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    event = result(tmp_path, status, xml)
    assert summary(tmp_path, monkeypatch, capsys, event, bazel_exit=bazel_exit) == expected


def test_a_target_that_did_not_build_is_a_failure(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    event = {"id": {"targetCompleted": {"label": "//tests:a"}}, "completed": {"success": False}}
    line = summary(tmp_path, monkeypatch, capsys, event, bazel_exit=1)
    assert line == (1, "0 passed, 1 failed, 0 skipped")


def test_no_test_at_all_is_a_failure(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert summary(tmp_path, monkeypatch, capsys, bazel_exit=0)[0] == 1
