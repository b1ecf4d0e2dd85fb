"""Runs of `python -m jaxlm.main` one after the other in one process, of the jaxlm that PYTHONPATH names.

    python several_runs.py '[{"argv": ["--config=X.py", ...], "code": 0}, {"argv": [...], "stop_at": 6, "code": 4}]'

`code` is the exit code that is expected. `stop_at` sends SIGTERM just before the loop asks, after that step, whether to
stop; it knows the loop of commit b4c35ec and no other.
"""

import json
import runpy
import signal
import sys


def stop_at(step: int | None) -> None:
    """Makes the loop of b4c35ec get SIGTERM after `step`; None for never."""
    from jaxlm.train import loop

    def requested(self, now: int) -> bool:
        if now == step:
            signal.raise_signal(signal.SIGTERM)
        return self._asked.is_set()

    loop.StopSignal.requested = requested


def run(argv: list[str]) -> int:
    """The exit code of `python -m jaxlm.main ARGV`."""
    sys.argv = ["jaxlm.main", *argv]
    try:
        runpy.run_module("jaxlm.main", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


if __name__ == "__main__":
    for job in json.loads(sys.argv[1]):
        if "stop_at" in job:
            stop_at(job["stop_at"])
        code = run(job["argv"])
        if code != job["code"]:
            sys.exit(f"exit code {code} in place of {job['code']}: {' '.join(job['argv'])}")
