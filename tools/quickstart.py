"""Runs deepep.quickstart from the source tree: ./bazelw run //tools:quickstart -- --steps 5"""

import runpy

if __name__ == "__main__":
    runpy.run_module("deepep.quickstart", run_name="__main__", alter_sys=True)
