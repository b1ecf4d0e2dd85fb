"""The program of the process that judges: takes orders from its parent, one at a time, and answers each.

    python -P -m jaxlm.train.rewards.child LINK ALIVE PARENT

LINK is the number of a socket: orders come as pickles of (name, arguments), answers go as JSON with `done`, `refused` or
`failed`. ALIVE is that of a pipe whose other end the parent alone holds. It imports no JAX.
"""

import contextlib
import faulthandler
import fcntl
import json
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback

from jaxlm.train.rewards import judges, wire

_LOOK_S = 1.0


def main(link: int, alive: int, parent: int) -> None:
    """Takes orders until the parent is gone."""
    _die_with(parent, alive)
    faulthandler.enable()
    sys.path.insert(0, os.getcwd())  # not earlier: a file there may have the name of a module that this program needs
    connection = socket.socket(fileno=link)
    os.set_inheritable(link, False)
    judge = judges.Judge()
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            name, arguments = pickle.loads(wire.receive(connection))
            answer = _answer(judge, name, arguments)
            sys.stdout.flush()
            wire.send(connection, json.dumps(answer).encode())


def _answer(judge: judges.Judge, name: str, arguments: tuple) -> dict:
    try:
        return {"done": judges.ORDERS[name](judge, *arguments)}
    except judges.Refused as error:
        return {"refused": str(error)}
    except judges.Wrong as error:
        return {"failed": str(error)}
    except BaseException as error:  # SystemExit too: the function's is no reason to end
        traceback.print_exc()
        return {"failed": judges.one_line(error)}


def _die_with(parent: int, alive: int) -> None:
    """Ends this process and all that it starts when the parent ends, however that ends.

    On Linux the kernel does it, when the parent's end of the pipe closes: also while a call into C holds Python's lock, as
    a regular expression does. (PR_SET_PDEATHSIG would end this process alone, and with the thread that started it.)
    Elsewhere, or if a fork of the parent holds the pipe open, a thread looks each second.
    """
    os.set_inheritable(alive, False)
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(alive, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(alive, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(alive, fcntl.F_SETFL, fcntl.fcntl(alive, fcntl.F_GETFL) | os.O_ASYNC)

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=look, daemon=True).start()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
