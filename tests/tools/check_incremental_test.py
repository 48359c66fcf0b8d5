"""How the check reads Bazel's log; the check itself runs in .ci/run, since it runs Bazel."""

import json

import pytest

from tools import check_incremental


def test_the_log_is_one_object_after_another() -> None:
    entries = [{"listedOutputs": ["a.o", "b.o"]}, {"runner": "disk cache hit"}]
    log = "\n".join(json.dumps(entry, indent=2) for entry in entries) + "\n"
    assert list(check_incremental.spawned(log)) == [
        (entries[0], ["a.o", "b.o"]),
        (entries[1], []),
    ]


def test_more_than_expected_fails_and_so_does_nothing_at_all() -> None:
    check_incremental.require("x", ["kernels/mine/dispatch.o"], [])
    for made, unexpected in ([], []), (["other/dispatch.o"], ["other/dispatch.o"]):
        with pytest.raises(SystemExit):
            check_incremental.require("x", made, unexpected)
    made = ["kernels/mine/notify.o", "kernels/manifest.json", "kernels/other/notify.o"]
    assert check_incremental.foreign(made, "mine") == ["kernels/other/notify.o"]
