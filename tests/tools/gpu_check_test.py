"""The one command for GPU tests: what it asks pytest for, and what it keeps of the answers."""

from types import SimpleNamespace

from tools import gpu_check


def test_the_unbuilt_package_of_the_source_tree_is_not_found_first() -> None:
    arguments = gpu_check.pytest_arguments("plain")
    assert f"pythonpath={gpu_check.ROOT}" in arguments
    assert arguments[-3:] == ["-k", "plain", str(gpu_check.ROOT / "tests" / "gpu")]
    assert "-k" not in gpu_check.pytest_arguments("")


def test_every_test_is_counted_once_with_what_it_said() -> None:
    recorder = gpu_check.Recorder()
    skip = ("file", 1, "Skipped: no GPU")
    for name, when, outcome, text in (
        ("a", "setup", "passed", None),
        ("a", "call", "passed", None),
        ("a", "teardown", "passed", None),
        ("b", "setup", "skipped", skip),
        ("c", "call", "failed", "rank 1: wrong"),
    ):
        recorder.pytest_runtest_logreport(
            SimpleNamespace(
                nodeid=name,
                when=when,
                outcome=outcome,
                duration=1,
                user_properties=[("seconds", 0.254)] if name == "c" else [],
                longrepr=text,
                longreprtext=text,
            )
        )
    assert recorder.counts() == {"passed": 1, "failed": 1, "skipped": 1}
    assert recorder.tests["b"]["text"] == "Skipped: no GPU"
    assert recorder.tests["c"]["text"] == "rank 1: wrong"
    assert [recorder.tests[name]["seconds"] for name in "ac"] == [1, 0.25]
