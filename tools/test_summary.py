#!/usr/bin/env python3
"""Sum up one `bazel test` in a line that people and CI read: `N passed, N failed, N skipped`.

    ./bazelw test //tests:all --build_event_json_file=EVENTS; tools/test_summary.py EVENTS $?

Counts the test cases in the test.xml files that the run's events name, so results that an earlier
run left behind do not count. A target that reported no case counts as one: passed or failed as
Bazel says. Exits non-zero unless Bazel succeeded and something passed.
"""

from __future__ import annotations

import collections
import json
import pathlib
import sys
import urllib.parse
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from typing import Any


def events(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """The build events; the last line may be cut when Bazel was killed."""
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            print(f"{path}: a cut line, ignored", file=sys.stderr)


def cases(result: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(outcome, name) of each test case that a testResult event's test.xml lists."""
    for output in result.get("testActionOutput", []):
        if output.get("name") != "test.xml":
            continue
        path = pathlib.Path(urllib.parse.unquote(urllib.parse.urlparse(output.get("uri", "")).path))
        try:
            found = ElementTree.parse(path).iter("testcase")
        except (OSError, ElementTree.ParseError):
            continue
        for case in found:
            tags = {child.tag for child in case}
            outcome = "skipped" if "skipped" in tags else "passed"
            if tags & {"failure", "error"}:
                outcome = "failed"
            yield outcome, f"{case.get('classname', '')}::{case.get('name', '')}"


def summarize(path: pathlib.Path) -> tuple[collections.Counter[str], list[str]]:
    """Counts of outcomes, and the names of what failed."""
    counts: collections.Counter[str] = collections.Counter()
    failures: list[str] = []
    for event in events(path):
        identity = event.get("id", {})
        label = identity.get("testResult", identity.get("targetCompleted", {})).get("label", "")
        if "testResult" in event:
            passed = event["testResult"].get("status") == "PASSED"
            outcomes = list(cases(event["testResult"]))
            # A timeout or crash of the target fails it whatever its cases said.
            if not outcomes or (not passed and all(outcome != "failed" for outcome, _ in outcomes)):
                outcomes.append(("passed" if passed else "failed", "the whole target"))
            counts.update(outcome for outcome, _ in outcomes)
            failures += [f"{label} {name}" for outcome, name in outcomes if outcome == "failed"]
        elif "targetCompleted" in identity and not event.get("completed", {}).get("success", False):
            counts["failed"] += 1
            failures.append(f"{label} did not build")
    return counts, failures


def main() -> int:
    path, bazel_exit = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    counts, failures = summarize(path) if path.exists() else (collections.Counter[str](), [])
    if bazel_exit and not counts["failed"]:
        counts["failed"] = 1
        failures.append(f"bazel exited {bazel_exit} before it could say which test failed")
    for failure in failures:
        print(f"FAILED {failure}")
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return 0 if not counts["failed"] and counts["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
