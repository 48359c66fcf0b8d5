"""Runs deepep.doctor from the source tree: ./bazelw run //tools:doctor -- --json"""

import runpy

if __name__ == "__main__":
    runpy.run_module("deepep.doctor", run_name="__main__", alter_sys=True)
