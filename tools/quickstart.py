"""Runs deepep.quickstart from the source tree: ./bazelw run //tools:quickstart -- --steps 5"""

import os
import runpy

if __name__ == "__main__":  # Not in the ranks' processes: they import this file again.
    # Bazel starts it elsewhere; paths in flags count from where Bazel was called.
    os.chdir(os.environ.get("BUILD_WORKING_DIRECTORY", "."))
    runpy.run_module("deepep.quickstart", run_name="__main__", alter_sys=True)
