"""Runs of `python -m jaxlm.main` one after the other in one process: `several_resumes.py FILE`, with lists of arguments."""

import contextlib
import json
import pathlib
import runpy
import sys

for argv in json.loads(pathlib.Path(sys.argv[1]).read_text()):
    sys.argv = ["jaxlm.main", *argv]
    with contextlib.suppress(SystemExit, Exception):
        runpy.run_module("jaxlm.main", run_name="__main__", alter_sys=True)
