"""The supervisor, with children that are a few lines of Python: no JAX, no training.

Each child is a list of what its first, second, ... start does; a file counts the starts.
"""

import dataclasses
import os
import pathlib
import pty
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent import futures

import pytest
import tiny_stops

from jaxlm import config
from jaxlm.config import config_files
from jaxlm.host import files
from jaxlm.run import supervised
from jaxlm.run.survive import children, farewell, supervisor

ROOT = pathlib.Path(__file__).resolve().parents[3]
QUICK = supervisor.Times(look=0.02, still=0.3, at_once=0.2, stacks=1, term=0.5, kill=5)
HEAD = """
import faulthandler, os, pathlib, signal, sys, time
from jaxlm.run import clock
folder = pathlib.Path(sys.argv[1])
count = folder / "starts"
start = int(count.read_text()) + 1 if count.exists() else 1
count.write_text(str(start))
faulthandler.register(signal.SIGUSR1, file=int(os.environ["JAXLM_STACKS"]))
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
pulse = clock.Pulse.of_parent()
def at(step, activity=clock.STEP, detail=""):
    pulse.write(step, activity, detail)
def save(step):
    (folder / "checkpoints" / str(step)).mkdir(parents=True)
def hang():
    time.sleep(60)
def stops(code=4):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(code))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(code))
"""
SEVERAL = {"distributed.coordinator": "localhost:1", "distributed.num_processes": 2, "distributed.process_id": 0}


def make(folder, *starts, times=QUICK, tell=None, **keys):
    """A supervisor whose child does `starts[0]` at its first start, and so on; the last one again and again."""
    keys = {"runs.backoff_s": 0.01, "workdir": folder} | keys
    c = config.resolve(config_files.load("quickstart", [f"{name}={value}" for name, value in keys.items()]))
    body = [f"if start {'==' if n < len(starts) else '>='} {n}:\n" for n in range(1, len(starts) + 1)]
    body = [head + textwrap.indent(text, "    ") for head, text in zip(body, starts, strict=True)]
    script = folder / "child.py"
    script.write_text("\n".join([HEAD, *body]))
    told = tell or (lambda event, text: None)
    return supervisor.Supervisor([sys.executable, str(script), str(folder)], c, told, times)


def run(folder, *starts, **keys):
    """The exit code, and how often the child was started."""
    code = make(folder, *starts, **keys).run()
    return code, int((folder / "starts").read_text())


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_what_the_child_says_goes_into_a_file_if_there_is_one(tmp_path, capfd):
    silent = make(tmp_path, "print('printed'); sys.stderr.write('said'); sys.exit(0)")
    c = config.resolve(config_files.load("quickstart", [f"workdir={tmp_path}"]))
    command = [sys.executable, str(tmp_path / "child.py"), str(tmp_path)]
    assert supervisor.Supervisor(command, c, times=QUICK, output=tmp_path / "output").run() == 0
    assert sorted((tmp_path / "output").read_text()) == sorted("printed\nsaid")
    assert capfd.readouterr() == ("", "")
    assert silent.run() == 0
    assert capfd.readouterr() == ("printed\n", "said")


@pytest.mark.parametrize("code", [0, 2, 3, 4])
def test_what_ended_by_its_own_decision_is_not_started_again(tmp_path, code):
    assert run(tmp_path, f"at(3); sys.exit({code})") == (code, 1)


def test_a_crash_is_started_again_from_the_last_checkpoint(tmp_path, capfd):
    crash, killed = "save(10); at(12); sys.exit(1)", "at(14); os.kill(os.getpid(), signal.SIGKILL)"
    told = []
    assert run(tmp_path, crash, killed, "sys.exit(0)", tell=lambda *words: told.append(words)) == (0, 3)
    said = capfd.readouterr().err
    assert "training failed (exit code 1) after step 12; starting again from the last checkpoint" in said
    assert "training was ended by SIGKILL after step 14; starting again" in said
    assert [event for event, _ in told] == ["crash", "crash"]


def test_the_same_step_twice_with_no_newer_checkpoint_is_the_end(tmp_path, capfd):
    assert run(tmp_path, "save(10)\nat(12); sys.exit(1)", "at(12); os.kill(os.getpid(), signal.SIGSEGV)") == (1, 2)
    said = capfd.readouterr().err
    assert "after step 12, as before, and no checkpoint was saved in between: not started again" in said


def test_a_newer_checkpoint_shortens_the_wait(tmp_path, capfd):
    starts = ["at(1); sys.exit(1)", "at(2); sys.exit(1)", "save(4); at(5); sys.exit(1)", "sys.exit(0)"]
    assert run(tmp_path, *starts, **{"runs.backoff_s": 0.1}) == (0, 4)
    waits = [line.split(" in ")[1] for line in capfd.readouterr().err.splitlines() if " in " in line]
    assert waits == ["0.1 s", "0.2 s", "0.1 s"]


def when(path, *numbers, pause=0.0):
    """Sends signals to this process once the file is there."""
    while not path.exists():
        time.sleep(0.01)
    for number in numbers:
        os.kill(os.getpid(), number)
        time.sleep(pause)


def signalled(folder, body, *numbers, pause=0.0, **keys):
    """The exit code where the supervisor gets these signals once its child has done `body`, which then hangs."""
    s = make(folder, f"{body}\n(folder / 'ready').touch(); hang()", **keys)
    threading.Thread(target=when, args=(folder / "ready", *numbers), kwargs={"pause": pause}).start()
    return s.run()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 4), (signal.SIGINT, 1)])
def test_a_signal_is_passed_on_once_and_ends_the_restarts(tmp_path, number, code):
    assert signalled(tmp_path, f"stops({code}); at(5)", number) == code


def test_a_signal_before_training_began_is_4(tmp_path, capfd):
    assert signalled(tmp_path, "pass", signal.SIGTERM) == 4
    assert "stopped before training began; the same command goes on" in capfd.readouterr().err


@pytest.mark.parametrize("activity", ["COMPILE", "MIRROR"])
def test_what_hears_no_signal_before_the_first_step_is_ended_and_nothing_was_to_be_saved(tmp_path, capfd, activity):
    """XLA hears no signal for minutes. A second ctrl-C changes nothing."""
    deaf = f"signal.signal(signal.SIGINT, signal.SIG_IGN); at(0, clock.{activity})"
    numbers, times = (signal.SIGINT, signal.SIGINT), dataclasses.replace(QUICK, still=30)
    began = time.monotonic()
    assert signalled(tmp_path, deaf, *numbers, pause=0.05, times=times) == 4
    assert time.monotonic() - began < 20
    said = capfd.readouterr().err
    assert ("stopping: no step is done yet, so nothing is to be saved" in said) == (activity == "COMPILE")
    assert "stopped before training began; the same command goes on" in said


def test_a_compilation_of_several_processes_is_not_ended(tmp_path, capfd):
    """All of them stop at the same step: one that ends alone makes the others start again."""
    stops = "signal.signal(signal.SIGTERM, signal.SIG_IGN); at(0, clock.COMPILE); (folder / 'ready').touch()\n"
    keys = SEVERAL | {"distributed.process_id": 1}
    assert signalled(tmp_path, stops + "time.sleep(1); sys.exit(4)", signal.SIGTERM, **keys) == 4
    assert "still stopping: it waits for the compilation" in capfd.readouterr().err


def test_the_second_request_ends_a_save_that_hangs(tmp_path, capfd):
    deaf = "signal.signal(signal.SIGINT, signal.SIG_IGN); at(7, clock.SAVE, 'r/checkpoints/7')"
    assert signalled(tmp_path, deaf, signal.SIGINT, signal.SIGINT, pause=0.6) == 1
    said = capfd.readouterr().err
    assert "still stopping: it waits for the save (r/checkpoints/7); again to stop at once" in said
    assert "stopped at once; what came after the last checkpoint is not saved" in said


# Saves for a while when it is asked to stop, and stops at once by a ctrl-C after that.
SAVES = """
asked = []
def on_signal(number, frame):
    if asked and number == signal.SIGINT:
        os._exit(1)
    asked.append(number)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, on_signal)
at(7)
(folder / "ready").touch()
while not asked:
    time.sleep(0.01)
at(7, clock.SAVE)
while not (folder / "sent").exists():
    time.sleep(0.01)
time.sleep(0.4)
save(7)
sys.exit(4)
"""


def test_two_signals_that_mean_one_request_cost_no_save(tmp_path, monkeypatch, draw, trials):
    """Whole: pytest -n0 tests/run/survive/test_supervisor.py -k two_signals --trials=40 --draw=34"""
    faster = 0.2
    monkeypatch.setattr(supervised, "_SAME_S", faster * tiny_stops.SAME)
    acts = []
    monkeypatch.setattr(farewell, "watch_for_notices", lambda clouds, act, say: acts.append(act) or (lambda: None))
    lost = []
    for number, pair in enumerate(tiny_stops.pairs(trials(2), draw)):
        monkeypatch.setattr(supervised, "announced", False)
        folder = tmp_path / str(number)
        folder.mkdir()
        supervised_run = make(folder, SAVES, **{"runs.notices": ("gce",)})

        def send(folder=folder, pair=pair):
            while not (folder / "ready").exists():
                time.sleep(0.01)
            for name, apart in ((pair.first, faster * pair.apart), (pair.second, 0.0)):
                acts[-1]() if name == tiny_stops.NOTICE else os.kill(os.getpid(), name)
                time.sleep(apart)
            (folder / "sent").touch()

        threading.Thread(target=send).start()
        code, saved = supervised_run.run(), (folder / "checkpoints/7").exists()
        lost += [pair] * ((code, saved) != ((1, False) if pair.ends else (4, True)))
    assert not lost


def test_what_means_the_same_request_costs_no_farewell(tmp_path):
    s = make(tmp_path, "stops(); at(5); (folder / 'ready').touch(); hang()")
    with supervisor.signals([s]):
        threading.Thread(target=when, args=(tmp_path / "ready", signal.SIGTERM)).start()
        assert s.run() == 4
        for number in (signal.SIGHUP, signal.SIGTERM):
            signal.raise_signal(number)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_one_ctrl_c_stops_all_runs_of_a_process(tmp_path, capfd):
    folders = [tmp_path / "a", tmp_path / "b"]
    runs = []
    for folder in folders:
        folder.mkdir()
        made = make(folder, "stops(); at(5); (folder / 'ready').touch(); hang()")
        runs.append(dataclasses.replace(made, output=folder / "output"))
    killed = {}
    with futures.ThreadPoolExecutor() as pool, supervisor.signals(killed):
        with pytest.raises(KeyboardInterrupt):  # none trains
            signal.raise_signal(signal.SIGTERM)
        codes = [pool.submit(killed.setdefault(run, run).run) for run in runs]
        for folder in folders:
            when(folder / "ready")
        signal.raise_signal(signal.SIGINT)
        assert [code.result() for code in codes] == [4, 4]
    assert capfd.readouterr().err == ""


def test_a_run_among_several_is_named(tmp_path, capfd):
    made = make(tmp_path, "at(12); sys.exit(1)", "sys.exit(0)")
    assert dataclasses.replace(made, output=tmp_path / "output").run() == 0
    assert f"jaxlm: {tmp_path.name}: training failed (exit code 1) after step 12" in capfd.readouterr().err


FAULT = "from jaxlm.run import supervised; supervised.mark_fault(); sys.exit(1)"


def test_storage_that_fails_for_ever_is_given_up(tmp_path, capfd):
    assert run(tmp_path, FAULT, times=dataclasses.replace(QUICK, patience=0.0)) == (1, 2)
    said = capfd.readouterr().err
    assert "as before, and storage or network failed for too long: not started again" in said


def test_where_others_start_again_a_fault_at_the_start_has_two_tries(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert run(tmp_path, FAULT) == (1, 2)


@pytest.mark.parametrize(
    ("error", "marked"),
    [
        ("config.RunError('a mirror') from OSError(5, 'I/O error')", True),
        ("config.RunError('reward.function refuses')", False),
    ],
)
def test_a_command_that_trains_marks_what_storage_and_network_did(tmp_path, error, marked):
    body = (
        "import types; from jaxlm.cli import cli; from jaxlm import config\ndef program(*args):\n    raise "
        + error
        + "\n"
    )
    body += "sys.modules['jaxlm.commands.train.text'] = types.SimpleNamespace(run=program)\n"
    body += "cli.main(['train', 'quickstart'], script=True)\n"
    assert run(tmp_path, body + "sys.exit(0 if (pulse.read() or '    ')[3] == clock.FAULT else 3)") == (
        3 * (not marked),
        1,
    )


def test_a_signal_between_two_starts_is_4(tmp_path):
    told = lambda *words: os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
    began = time.monotonic()
    assert run(tmp_path, "at(3); sys.exit(1)", tell=told, **{"runs.backoff_s": 60}) == (4, 1)
    assert time.monotonic() - began < 50


def test_a_hang_is_told_with_stacks_and_started_again(tmp_path, capfd):
    lost = "print('lost', os.environ['JAXLM_LOST'], file=sys.stderr)"
    told = []
    code = run(
        tmp_path,
        "at(7, clock.SAVE, 'r/checkpoints/7'); hang()",
        f"{lost}; sys.exit(0)",
        tell=lambda *words: told.append(words),
        **{"runs.hang_s": 0.4},
    )
    assert code == (0, 2)
    said = capfd.readouterr().err
    assert "no sign of life for 0." in said
    assert "it waits for the save (r/checkpoints/7)" in said
    assert "in hang" in said  # the main thread's place
    assert "training hung after step 7; starting again" in said
    kept = (tmp_path / "hang-1.txt").read_text()
    assert "Current thread" in kept
    assert "child.py" in kept
    (lost,) = (line for line in said.splitlines() if line.startswith("lost "))
    assert 0.4 < float(lost.removeprefix("lost ")) < 3
    assert told[0][0] == "stall"


def test_a_child_that_was_stopped_is_a_hang_too(tmp_path):
    frozen = "at(7); os.kill(os.getpid(), signal.SIGSTOP); hang()"
    assert run(tmp_path, frozen, "sys.exit(0)", **{"runs.hang_s": 0.4}) == (0, 2)


@pytest.mark.parametrize("several", [False, True])
def test_only_a_run_of_one_process_gets_sigterm_for_a_hang(tmp_path, several):
    """JAX passes SIGTERM on: the other processes of the run would end with exit code 4 and never come back."""
    told = "signal.signal(signal.SIGTERM, lambda *_: (folder / 'told').touch()); at(7); hang()"
    assert run(tmp_path, told, "sys.exit(0)", **{"runs.hang_s": 0.4}, **(SEVERAL if several else {})) == (0, 2)
    assert (tmp_path / "told").exists() != several


def test_orphans_of_a_dead_child_are_ended(tmp_path):
    orphan = "import subprocess; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    write = "(folder / 'orphan').write_text(str(p.pid)); os.kill(os.getpid(), signal.SIGKILL)"
    assert run(tmp_path, orphan + write, "sys.exit(0)") == (0, 2)
    pid = int((tmp_path / "orphan").read_text())
    end = time.monotonic() + 5
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    assert not alive(pid)


def test_shared_memory_of_a_dead_child_is_removed(tmp_path):
    """Python's resource tracker does it, if it is given the time."""
    left = "from multiprocessing import shared_memory\nm = shared_memory.SharedMemory(create=True, size=1000)\n"
    left += "(folder / 'name').write_text(m.name); os.kill(os.getpid(), signal.SIGKILL)"
    assert run(tmp_path, left, "sys.exit(0)") == (0, 2)
    assert not pathlib.Path("/dev/shm", (tmp_path / "name").read_text()).exists()


def state_of(pid):
    """The state of a process: R, S, T for stopped, Z; "" if there is none."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def alive(pid):
    return state_of(pid) not in ("", "Z")


def test_the_lock_is_handed_down_and_held_between_starts(tmp_path):
    """The child gets the parent's lock; nobody else does, and it is free at the end."""
    mine = "from jaxlm.host import files; held = files.lock(folder, 'trains in', 'config.workdir')\n"
    other = "import subprocess; env = {k: v for k, v in os.environ.items() if k != 'JAXLM_LOCK'}\n"
    other += 'words = \'import pathlib; from jaxlm.host import files; files.lock(pathlib.Path(%r), "x", "y")\' % str(folder)\n'
    other += "p = subprocess.run([sys.executable, '-c', words], env=env, capture_output=True, text=True)\n"
    other += "sys.exit(0 if p.returncode and 'another process x' in p.stderr else 2)"
    assert run(tmp_path, mine + "held.close(); at(3); sys.exit(1)", mine + other) == (0, 2)
    files.lock(tmp_path, "trains in", "config.workdir").close()


def test_stdin_and_the_config_reach_the_child(tmp_path, monkeypatch):
    """A config file that is edited meanwhile changes nothing: the child gets the config as it was read."""
    read, write = os.pipe()
    os.write(write, b"typed")
    os.close(write)
    saved = os.dup(0)
    os.dup2(read, 0)
    try:
        body = "from jaxlm.run import supervised; c = supervised.adopt()\n"
        body += "sys.exit(0 if sys.stdin.read() == 'typed' and c.seed == 77 else 3)"
        assert run(tmp_path, body, seed=77) == (0, 1)
    finally:
        os.dup2(saved, 0)
        os.close(saved)
        os.close(read)


def test_signals_are_held_in_the_child_until_its_modules_are_imported(tmp_path):
    body = "from jaxlm.run import supervised; supervised.adopt()\n"
    body += "for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP): signal.raise_signal(n)\n"
    body += "(folder / 'imported').touch()\ntry: supervised.stop_at_once_until_training()\n"
    body += "except KeyboardInterrupt: sys.exit(3 if supervised.requests.first == signal.SIGINT else 2)"
    assert run(tmp_path, body) == (3, 1)
    assert (tmp_path / "imported").exists()


def in_a_process(folder, body, first="", **options):
    """A supervisor in a process of its own, whose child does `body`, when that has written its process id."""
    make(folder, body)
    code = f"""{first}
from jaxlm import config; from jaxlm.config import config_files
from jaxlm.run import supervised; from jaxlm.run.survive import supervisor
c = config.resolve(config_files.load("quickstart", ["workdir={folder}"]))
raise SystemExit(supervisor.Supervisor([{sys.executable!r}, "{folder}/child.py", "{folder}"], c).run())
"""
    process = subprocess.Popen([sys.executable, "-c", code], **options)
    path = folder / "pid"
    while not path.exists() or not path.read_text():
        assert process.poll() is None
        time.sleep(0.02)
    return process, int(path.read_text())


TAKE_TERMINAL = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)"
READY = "(folder / 'pid').write_text(str(os.getpid()))\n"


def test_a_killed_supervisor_ends_its_child_which_knows_it_and_a_new_start_waits_for_it(tmp_path):
    """kill -9: the child gets SIGTERM, saves for a while and ends; until then the lock is its own."""
    body = "from jaxlm.run import supervised; supervised.adopt(); before = supervised.orphaned()\n"
    body += "from jaxlm.host import files; held = files.lock(folder, 'trains in', 'config.workdir')\n"
    body += "told = lambda: (folder / 'told').write_text(f'{before} {supervised.orphaned()}')\n"
    body += (
        "end = lambda *_: (time.sleep(1), told(), save(8), os._exit(4))\n"  # the signal may come before the new parent
    )
    process, _ = in_a_process(tmp_path, body + "signal.signal(signal.SIGTERM, end)\n" + READY + "at(7); hang()")
    process.kill()
    process.wait()
    began = time.monotonic()
    files.lock(tmp_path, "trains in", "config.workdir", wait_s=20).close()
    assert (tmp_path / "checkpoints/8").is_dir()
    assert time.monotonic() - began < 5
    assert (tmp_path / "told").read_text() == "False True"


def test_a_child_that_was_stopped_before_its_first_step_says_so_once(tmp_path, capfd):
    """XLA's threads may keep Python from ending: the supervisor would end it, and say again that the run stopped."""
    body = "import threading, types; from jaxlm.cli import cli\ndef program(config, args):\n"
    body += "    threading.Thread(target=hang).start(); at(0, clock.COMPILE); (folder / 'ready').touch(); hang()\n"
    body += "sys.modules['jaxlm.commands.train.text'] = types.SimpleNamespace(run=program)\n"
    assert signalled(tmp_path, body + "sys.exit(cli.main(['train', 'quickstart'], script=True))", signal.SIGTERM) == 4
    said = capfd.readouterr().err
    assert "jaxlm: stopped; the same command goes on from what is done" in said
    assert "stopped before training began" not in said


def test_a_terminal_s_ctrl_c_reaches_the_child_once(tmp_path):
    body = "signal.signal(signal.SIGINT, lambda *_: (folder / 'got').open('a').write('x'))\n" + READY
    body += "at(7)\nwhile not (folder / 'got').exists(): time.sleep(0.02)\ntime.sleep(0.3); sys.exit(4)"
    master, slave = pty.openpty()
    process, _ = in_a_process(tmp_path, body, first=TAKE_TERMINAL, stdin=slave, start_new_session=True)
    os.close(slave)
    os.write(master, b"\x03")
    assert process.wait(20) == 4
    os.close(master)
    assert (tmp_path / "got").read_text() == "x"


def test_ctrl_z_stops_both_and_fg_goes_on_with_both(tmp_path):
    body = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))\n" + READY + "at(7); hang()"
    process, pid = in_a_process(tmp_path, body, process_group=0)
    for number, state in ((signal.SIGTSTP, "T"), (signal.SIGCONT, "S"), (signal.SIGTSTP, "T"), (signal.SIGCONT, "S")):
        process.send_signal(number)
        end = time.monotonic() + 10
        while {state_of(pid), state_of(process.pid)} != {state}:
            assert time.monotonic() < end
            time.sleep(0.02)
    process.terminate()
    assert process.wait(20) == 4


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SKYPILOT_TASK_ID", "KUBERNETES_SERVICE_HOST"])
def test_auto_leaves_restarts_to_those_who_do_them(monkeypatch, name):
    for other in ("SLURM_JOB_ID", "SKYPILOT_TASK_ID", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(other, raising=False)
    assert supervisor.wanted("auto")
    assert not supervisor.wanted("off")
    monkeypatch.setenv(name, "1")
    assert not supervisor.wanted("auto")
    assert supervisor.wanted("on")


def test_only_a_whole_command_is_started_again(monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "-X", "dev", "-m", "jaxlm.main", "--config=a"])
    monkeypatch.setattr(sys, "argv", ["/x/jaxlm/main.py", "--config=a"])
    assert supervisor.command() == [sys.executable, "-X", "dev", "-m", "jaxlm.main", "--config=a"]
    monkeypatch.setattr(sys, "argv", ["jaxlm.main", "--config=b"])  # another program set it, to run several
    assert supervisor.command() is None


def test_processes_that_never_met_end_with_a_line(tmp_path, capfd):
    assert run(tmp_path, "os.abort()", **SEVERAL) == (1, 1)
    assert "ended by SIGABRT after step 0, before all processes of the run had met" in capfd.readouterr().err


def test_a_dead_peer_is_named_and_its_return_is_waited_for(tmp_path, capfd):
    starts = ["at(9); os.abort()", *["at(0, clock.START); os.abort()"] * 3, "sys.exit(0)"]
    assert run(tmp_path, *starts, **SEVERAL) == (0, 5)
    assert "SIGABRT after step 9 (another process of the run died or froze); starting again" in capfd.readouterr().err


def test_a_child_that_can_not_be_killed_is_given_up(tmp_path, capfd, monkeypatch):
    """In state D not even SIGKILL ends a process: here nothing is sent."""
    monkeypatch.setattr(supervisor.children.Child, "send", lambda self, number: None)
    monkeypatch.setattr(supervisor.children.Child, "send_all", lambda self, number: None)
    times = dataclasses.replace(QUICK, stacks=0.1, term=0.1, kill=0.2)
    stays = "(folder / 'pid').write_text(str(os.getpid())); at(7, clock.SAVE); time.sleep(30)"
    assert run(tmp_path, stays, times=times, **{"runs.hang_s": 0.3}) == (1, 1)
    assert "can't be ended: it waits inside the kernel" in capfd.readouterr().err
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_a_signal_that_comes_while_a_dead_child_is_reaped_is_no_error(tmp_path, monkeypatch):
    reap = children.Child.reap

    def reap_and_signal(child):
        code = reap(child)
        os.kill(os.getpid(), signal.SIGTERM)
        return code

    monkeypatch.setattr(children.Child, "reap", reap_and_signal)
    assert run(tmp_path, "at(3); sys.exit(0)") == (0, 1)


def test_a_ctrl_c_in_the_first_moments_of_the_child_waits_until_it_is_ready(tmp_path):
    """Python's own start knows no handler but the one that prints a traceback."""
    body = "import pathlib, signal; blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ()); "
    body += f"pathlib.Path({str(tmp_path / 'blocked')!r}).write_text(str(signal.SIGINT in blocked))"
    child = children.Child([sys.executable, "-c", body], {}, {})
    os.waitpid(child.pid, 0)
    assert (tmp_path / "blocked").read_text() == "True"
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
