"""Run pytest on the files named in the arguments, in the way that Bazel's test runner expects."""

import os
import sys

import pytest


def main() -> int:
    sys.dont_write_bytecode = True
    args = ["-p", "no:cacheprovider", "-v", *sys.argv[1:]]
    if "TEST_TMPDIR" in os.environ:
        args += ["--basetemp", os.path.join(os.environ["TEST_TMPDIR"], "pytest")]
    if "XML_OUTPUT_FILE" in os.environ:
        args += ["--junitxml", os.environ["XML_OUTPUT_FILE"]]
    if "TESTBRIDGE_TEST_ONLY" in os.environ:  # bazel test --test_filter=EXPRESSION
        args += ["-k", os.environ["TESTBRIDGE_TEST_ONLY"]]
    return int(pytest.main(args))


if __name__ == "__main__":  # Not in processes that a test spawns: they import this file again.
    sys.exit(main())
