"""ctrl-C while modules are imported: one line, never a traceback."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from documented import ROOT

from jaxlm.host import interrupts

SCRIPT = ["-c", "import sys; from jaxlm.main import console_script; sys.exit(console_script())"]
MAIN = ["-m", "jaxlm.main"]
GOES_ON = "jaxlm: stopped; the same command goes on from what is done\n"
RELEASE = """
import signal, sys
sys.argv = ["jaxlm", "sample", "nosuch"]
from jaxlm.host import interrupts
interrupts.hold()
signal.raise_signal(signal.{number})
print("held", flush=True)
try:
    interrupts.release()
except KeyboardInterrupt:
    print("released", signal.getsignal(signal.SIGINT) == signal.default_int_handler, flush=True)
signal.raise_signal(signal.{number})
"""


IN_CALLBACK = """
import gc, os, signal, time
from jaxlm.host import console
console.drop_leftovers()
gc.callbacks.append(lambda *about: gc.callbacks.clear() or os.kill(os.getpid(), signal.SIGINT) or time.sleep(0))
gc.collect()
try:
    time.sleep(20)
    print("went on")
except KeyboardInterrupt:
    print("stopped")
"""


def test_ctrl_c_in_a_callback_of_the_garbage_collector_still_stops():
    """JAX has such a callback, and Python prints what is raised in one, and goes on."""
    done = subprocess.run([sys.executable, "-c", IN_CALLBACK], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("stopped\n", "")


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_a_signal_is_held_back_until_it_is_released(number):
    done = subprocess.run([sys.executable, "-c", RELEASE.format(number=number)], capture_output=True, text=True)
    assert done.stdout == "held\nreleased True\n"
    assert done.returncode == -getattr(signal, number)


WORKERS = """
import sys, time, types
from jaxlm.corpus import engine
def run(config, args):
    with engine.worker_processes(2) as pool:
        print(list(pool.map(abs, [1, -2])), flush=True)
        time.sleep(60)
sys.modules["jaxlm.commands.prepare"] = types.SimpleNamespace(run=run)
sys.argv = ["jaxlm", "prepare", "quickstart", "--config.data.dir=nowhere"]
from jaxlm.main import console_script
sys.exit(console_script())
"""


def test_a_command_that_goes_on_later_tidies_up_its_workers():
    """What worker processes share would else be left, and multiprocessing would warn of leaked semaphores."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", WORKERS], cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout.readline() == "[1, 2]\n"
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (4, GOES_ON)


def test_others_handlers_and_ignored_signals_stay():
    mine = {signal.SIGTERM: lambda number, frame: None, signal.SIGINT: signal.SIG_IGN}
    before = {number: signal.signal(number, handler) for number, handler in mine.items()}
    try:
        for act in (interrupts.hold, interrupts.release):
            act()
            assert {number: signal.getsignal(number) for number in mine} == mine
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_second_ctrl_c_ends_in_one_line():
    """Inside an import too, where an exception would become a traceback or be swallowed."""
    code = "import signal; from jaxlm.host import interrupts; interrupts.hold()\ntry:\n"
    code += "    signal.raise_signal(signal.SIGINT); signal.raise_signal(signal.SIGINT)\nexcept KeyboardInterrupt: pass"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (4, "jaxlm: stopped at once; nothing was begun\n")


# An extension that is interrupted while it starts says so by another error, as array_record does.
EXTENSION = """
import importlib.machinery, signal, sys
class Interrupted:
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == "jaxlm.commands.train.text" else None
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        try:
            signal.raise_signal(signal.NUMBER)
        except KeyboardInterrupt:
            raise ImportError("Encountered an error while initializing the extension") from None
        module.run = lambda config, args: print("went on") or 0
sys.meta_path.insert(0, Interrupted())
from jaxlm.main import console_script
sys.exit(console_script())
"""


@pytest.mark.parametrize(("number", "supervise"), [("SIGINT", "on"), ("SIGTERM", "off")])
def test_a_signal_while_the_program_is_imported_is_one_line(tmp_path, number, supervise):
    command = [sys.executable, "-c", EXTENSION.replace("NUMBER", number)]
    argv = ["train", "quickstart", "--config.workdir=w", f"--config.runs.supervise={supervise}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, *argv], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (4, "", GOES_ON)


@pytest.mark.parametrize(
    ("start", "argv", "after", "code", "told"),
    [
        (SCRIPT, ["plan", "quickstart"], 0.15, 1, "jaxlm: stopped\n"),
        (SCRIPT, ["prepare", "quickstart"], 0.4, 4, GOES_ON),
        (MAIN, ["--config=quickstart"], 0.3, 4, GOES_ON),
    ],
)
def test_ctrl_c_at_once_is_one_line(tmp_path, start, argv, after, code, told):
    command, pipe = [sys.executable, *start, *argv], subprocess.PIPE
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=pipe, stdout=pipe, text=True)
    _until_held(process)
    time.sleep(after)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    lines = [line for line in err.splitlines(keepends=True) if not line.startswith("folder: ")]
    assert (process.returncode, lines) == (code, [told])


def _until_held(process: subprocess.Popen) -> None:
    """Waits until Python has started and holds the signals back: SIGINT is in the mask of those that are caught."""
    for _ in range(1000):
        status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
        caught = int(next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1], 16)
        if caught >> (signal.SIGTERM - 1) & 1:  # Python itself catches SIGINT alone
            return
        time.sleep(0.005)
    raise TimeoutError
