"""Imports what a run of training imports, once, and forks a run whenever it is asked: a third of a start's processor time.

It reads lines of JSON, {"argv", "environ", "said"}, and answers each with the run's process id. When one ends it writes
[process id, exit code], negative for a signal, as subprocess does.
"""

import gc
import importlib
import json
import os
import random
import select
import sys

from jaxlm import main


def born(asked: dict) -> None:
    """Makes this new process what a start from the command line would be."""
    said = os.open(asked["said"], os.O_WRONLY)
    for descriptor, of in ((0, os.open(os.devnull, os.O_RDONLY)), (1, said), (2, said)):
        os.dup2(of, descriptor)
    os.environ.clear()
    os.environ.update(asked["environ"])
    sys.argv = ["jaxlm", "train", *asked["argv"]]
    random.seed()
    gc.unfreeze()


def serve() -> bool:
    """Returns True in the process of each run that is asked for, and False in this one once nobody asks any more."""
    living, buffer = 0, b""
    while True:
        if select.select([0], [], [], 0.02)[0]:
            part = os.read(0, 1 << 16)
            if not part:
                return False
            *asked, buffer = (buffer + part).split(b"\n")
            for line in asked:
                living += 1
                pid = os.fork()
                if not pid:
                    born(json.loads(line))
                    return True
                os.write(1, b"%d\n" % pid)
        while living:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            living -= 1
            os.write(1, json.dumps([pid, os.waitstatus_to_exitcode(status)]).encode() + b"\n")


if __name__ == "__main__":
    for name in ("jaxlm.cli.cli", "jaxlm.commands.train.text"):
        importlib.import_module(name)
    gc.freeze()  # pages that a collection touches are copied
    if serve():
        sys.exit(main.console_script())
