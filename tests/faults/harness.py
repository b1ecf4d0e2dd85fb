"""Runs training as a user does, in processes of its own, makes things fail around it, and compares what it leaves behind.

`Place` holds the data, the compile cache and a run that nothing happened to. `Place.start` begins a run; rules for the
shim (shim.c) make file operations of that run fail while they stand in its file of rules. What inside/sitecustomize.py reads
holds a run at a step, spoils batches, or turns verification off.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest

from jaxlm.run import metrics
from jaxlm.run.checkpoints import verify

STEPS = 24
EVERY = 4  # steps from one checkpoint to the next
KEYS = {
    "model.n_layers": 1, "model.d_model": 64, "model.n_heads": 4, "model.d_ff": 128, "model.vocab_size": 384,
    "train.steps": STEPS, "train.batch_size": 8, "train.seq_len": 64, "train.eval_every_steps": 0,
    "eval.batch_size": 8, "eval.max_mb": 0.002, "checkpoint.every_steps": EVERY, "checkpoint.every_minutes": 0,
    "checkpoint.reserve_mb": 0, "optim.warmup_steps": 4, "log.every_steps": 1, "log.tensorboard": False,
    "data.val_fraction": 0.1, "runs.supervise": "off", "runs.backoff_s": 0,
}  # fmt: skip
INSIDE = pathlib.Path(__file__).with_name("inside")
LATER = {"hold", "settle", "held_out", "crash"}  # faults inside the process that may begin after its imports
MARK = "FAULTS_OF"  # in the environment of every process that a place starts, and of theirs
CLOCKS = ("time", "wall_s", "cost_usd", "goodput", "tokens_per_second", "mfu_palm", "mfu_causal")


@functools.cache
def shim() -> pathlib.Path:
    """Compiles the shim. Skips the test where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        pytest.skip("faults of the disk need a C compiler: apt install gcc")
    source = pathlib.Path(__file__).with_name("shim.c")
    target = pathlib.Path(f"/tmp/jaxlm-shim-{os.getuid()}-{source.stat().st_mtime_ns}.so")
    if not target.exists():
        part = target.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", part, source, "-ldl", "-lpthread"], check=True)
        part.rename(target)
    return target


class Nursery:
    """A process that forks runs, so that none of them has to import what it needs; see nursery.py."""

    def __init__(self, environ: dict[str, str]):
        command = [sys.executable, "-W", "ignore", str(pathlib.Path(__file__).with_name("nursery.py"))]
        self.process = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self.codes: dict[int, int] = {}  # process id -> exit code, of those that ended

    def fork(self, argv: list[str], environ: dict[str, str], said: pathlib.Path) -> "Forked":
        """Begins a run, whose words go to the file `said`."""
        self.process.stdin.write(json.dumps({"argv": argv, "environ": environ, "said": str(said)}).encode() + b"\n")
        while isinstance(line := json.loads(self.process.stdout.readline()), list):
            self.codes[line[0]] = line[1]
        return Forked(line, self)

    def look(self, seconds: float) -> None:
        """Reads which runs have ended, or waits so long for the next to end."""
        while select.select([self.process.stdout], [], [], seconds)[0]:
            pid, code = json.loads(self.process.stdout.readline())
            self.codes[pid], seconds = code, 0

    def end(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.communicate()


class Forked:
    """A forked run, with what `subprocess.Popen` has."""

    def __init__(self, pid: int, nursery: Nursery):
        self.pid, self._nursery = pid, nursery

    @property
    def returncode(self) -> int | None:
        return self._nursery.codes.get(self.pid)

    def poll(self) -> int | None:
        if self.returncode is None:
            self._nursery.look(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = math.inf if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            if (left := end - time.monotonic()) < 0:
                raise subprocess.TimeoutExpired("a forked run", timeout)
            self._nursery.look(min(left, 1))
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@dataclasses.dataclass
class Started:
    """A run that goes on.

    Attributes:
      process: the process that was started.
      folder: the run's folder.
      rules: the file of rules for the shim; None without faults of the disk.
      inside: the file of faults inside the process.
      said: the file of what it says.
    """

    process: subprocess.Popen | Forked
    folder: pathlib.Path
    rules: pathlib.Path | None
    inside: pathlib.Path
    said: pathlib.Path

    def fault(self, *rules: str) -> None:
        """From now on these rules count, such as "write ENOSPC checkpoints/"; without any, all works again."""
        replace(self.rules, "".join(f"{rule}\n" for rule in rules))

    def hold(self, step: int | None) -> None:
        """Lets the run do no step after `step`; None lets it go on. It takes effect at the next batch."""
        self.set(hold=step)

    def set(self, **keys: object) -> None:
        """Changes what inside/sitecustomize.py reads."""
        replace(self.inside, json.dumps(json.loads(self.inside.read_text()) | keys))

    def go_on(self) -> None:
        """Lets a run that is held go on."""
        self.hold(None)

    def kill(self) -> None:
        """Ends the process by SIGKILL, and waits until it is gone."""
        self.process.kill()
        self.process.wait(60)

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float = 120) -> None:
        """Waits until a condition holds. Fails if the run ends before, or it takes too long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if condition():
                return
            if self.process.poll() is not None:
                raise AssertionError(f"the run ended ({self.process.returncode}) before {what}: {self.text()[-3000:]}")
            time.sleep(0.02)
        raise AssertionError(f"{what}: not within {seconds} s: {self.text()[-3000:]}")

    def wait_for_step(self, step: int) -> None:
        """Waits until metrics.jsonl has this step."""
        path = self.folder / "metrics.jsonl"
        self.wait_for(lambda: path.is_file() and f'"step": {step},' in path.read_text(), f"step {step}")

    def wait_for_words(self, words: str, seconds: float = 120) -> None:
        """Waits until the run has said these words."""
        self.wait_for(lambda: words in self.text(), repr(words), seconds)

    def wait_for_saved(self, step: int) -> None:
        """Waits until the checkpoint of a step is there, and verified."""
        self.wait_for(lambda: verified(self.folder, step), f"a checkpoint of step {step}")

    def text(self) -> str:
        """What the run has said so far."""
        return self.said.read_text(errors="replace")

    def end(self, code: int | None = 0, seconds: float = 180) -> str:
        """Waits until the run ends with this exit code (None: with any), and returns what it said: never a traceback."""
        try:
            found = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            raise AssertionError(f"no end within {seconds} s: {self.text()[-3000:]}") from None
        assert code is None or found == code, f"exit code {found} in place of {code}: {self.text()[-4000:]}"
        assert "Traceback" not in self.text(), self.text()[-4000:]
        return self.text()


def replace(path: pathlib.Path, text: str) -> None:
    """Replaces a file at once, so that a reader never sees half of it."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.rename(path)


def verified(folder: pathlib.Path, step: int) -> bool:
    """True if a run's checkpoint of this step was read back from the disk and equalled what was saved."""
    return verify.read_checksums(folder / "checkpoints" / str(step)) is not None


def steps(folder: pathlib.Path) -> list[int]:
    """The steps of the checkpoints in a run's folder."""
    found = (folder / "checkpoints").glob("*") if (folder / "checkpoints").is_dir() else ()
    return sorted(int(path.name) for path in found if path.name.isdigit())


class Place:
    """A folder with data, a compile cache and runs.

    Args:
      root: an empty folder.
      cache: the folder of compiled programs, which several places may share.
    """

    def __init__(self, root: pathlib.Path, cache: pathlib.Path | None = None):
        self.root, self.cache, self._numbers = root, cache or root / "cache", itertools.count()
        self._nurseries: dict[object, Nursery] = {}
        text = "one two three four five six seven eight nine ten red green blue sun moon sea"
        words = text.split()
        rng = random.Random(0)
        for source, documents in (("a", 300), ("b", 100)):
            lines = (" ".join(rng.choices(words, k=rng.randint(5, 120))) for _ in range(documents))
            (root / f"{source}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
        lines = ["from jaxlm.configs import base", "def get_config():", "    c = base.get_config()"]
        for source, weight in (("a", 3.0), ("b", 1.0)):
            lines.append(f"    c.data.sources.{source} = dict(path={str(root / source)!r} + '.jsonl', weight={weight})")
        lines += [f"    c.data.dir = {str(root / 'data')!r}", "    return c"]
        (root / "tiny.py").write_text("\n".join(lines) + "\n")

    def command(self, name: str, **overrides: object) -> list[str]:
        """The command of a run. Keys are written with __ in place of the dots."""
        keys = KEYS | {"workdir": self.root / name, "hardware.compile_cache": self.cache}
        keys |= {key.replace("__", "."): value for key, value in overrides.items()}
        flags = [f"--config.{key}={value}" for key, value in keys.items()]
        return [sys.executable, "-m", "jaxlm.main", f"--config={self.root / 'tiny.py'}", *flags]

    def environment(self, devices: int = 1) -> dict[str, str]:
        """The environment of a run, which compiles fast rather than well, as tests/conftest.py says."""
        paths = os.pathsep.join(filter(None, (str(INSIDE), os.environ.get("PYTHONPATH", ""))))
        devices = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
        return os.environ | devices | {"PYTHONPATH": paths, MARK: str(self.root)}

    def start(
        self,
        name: str,
        *,
        devices: int = 1,
        rules: tuple[str, ...] | None = None,
        inside: dict | None = None,
        settle: bool = True,
        env: dict | None = None,
        **overrides: object,
    ) -> Started:
        """Begins a run in the background.

        Args:
          name: of the run's folder; what each start says goes to a file of its own beside it.
          rules: for the shim from the start on; () for a shim that does nothing yet; None for none.
          inside: faults inside the process; see inside/sitecustomize.py.
          settle: True to do no step while a save is in flight.
        """
        folder, number = self.root / name, next(self._numbers)
        file, said = self.root / f"{name}.{number}.inside", self.root / f"{name}.{number}.txt"
        replace(file, json.dumps({"hold": None, "spoil": [], "settle": settle} | (inside or {})))
        environment = self.environment(devices) | {"INSIDE": str(file)} | (env or {})
        path = None
        if rules is not None:
            path = self.root / f"{name}.{number}.rules"
            path.write_text("".join(f"{rule}\n" for rule in rules))
            environment["LD_PRELOAD"] = str(shim())
        faults = {} if path is None else {"FAULTS": str(path)}
        command = self.command(name, **overrides)
        with open(said, "w") as words:
            # The supervisor repeats the command of its process, and what `env` says may be read at Python's start.
            if env or "runs__supervise" in overrides:
                process = subprocess.Popen(
                    command, env=environment | faults, stdout=words, stderr=words, stdin=subprocess.DEVNULL
                )
            else:  # by a process that began alike: with the shim or not, the faults of imports, the devices
                kind = (path is None, devices, frozenset({*(inside or ())} - LATER))
                if kind not in self._nurseries:
                    self._nurseries[kind] = Nursery(environment)
                process = self._nurseries[kind].fork(command[3:], environment | faults, said)
        return Started(process, folder, path, file, said)

    def several(
        self,
        name: str,
        n: int = 2,
        *,
        rules: dict[int, tuple[str, ...]] | None = None,
        inside: dict[int, dict] | None = None,
        **options: object,
    ) -> list[Started]:
        """Begins one run as `n` processes, and returns them. `rules` and `inside`: by process; the rest as for `start`."""
        with socket.socket() as s:
            s.bind(("localhost", 0))
            port = s.getsockname()[1]
        keys = {"distributed__coordinator": f"localhost:{port}", "distributed__num_processes": n}
        return [
            self.start(
                name,
                rules=(rules or {}).get(i),
                inside=(inside or {}).get(i),
                distributed__process_id=i,
                **keys | options,
            )
            for i in range(n)
        ]

    def left(self) -> list[psutil.Process]:
        """The processes that live of all that were started here, and of those that they started."""
        found, nurseries = [], {nursery.process.pid for nursery in self._nurseries.values()}
        for process in psutil.process_iter():
            try:
                if (
                    process.pid not in nurseries
                    and process.environ().get(MARK) == str(self.root)
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def end_all(self) -> None:
        """Ends whatever was started here, but for the processes that fork runs."""
        for process in self.left():
            with contextlib.suppress(psutil.Error):
                process.kill()

    def close(self) -> None:
        """Ends all processes."""
        self.end_all()
        for nursery in self._nurseries.values():
            nursery.end()

    def run(self, name: str, *, code: int = 0, **options: object) -> str:
        """Runs to the end, and returns what it said."""
        return self.start(name, **options).end(code)

    def stopped(self, name: str, step: int, inside: dict | None = None, **options: object) -> pathlib.Path:
        """Begins a run that is ended by SIGKILL after `step`, once the checkpoint before is there, and returns its folder."""
        run = self.start(name, inside={**(inside or {}), "hold": step}, **options)
        run.wait_for_saved(step // EVERY * EVERY)
        run.kill()
        return run.folder

    def copy(self, name: str, of: str) -> pathlib.Path:
        """Copies a run's folder."""
        return pathlib.Path(shutil.copytree(self.root / of, self.root / name))

    @functools.cached_property
    def whole(self) -> pathlib.Path:
        """The folder of a run that nothing happened to."""
        self.run("whole")
        return self.root / "whole"

    @functools.cached_property
    def two(self) -> pathlib.Path:
        """The folder of a run of two processes that nothing happened to."""
        for one in self.several("two"):
            one.end()
        return self.root / "two"

    def assert_exact(self, name: str, of: str | None = None) -> None:
        """Fails unless metrics of all steps and digests of all arrays equal those of a run that nothing happened to."""
        other = self.whole if of is None else self.root / of
        assert curve(self.root / name) == curve(other)
        assert digests(self.root / name) == digests(other)


def curve(folder: pathlib.Path) -> dict[int, dict]:
    """Step -> metrics without those that depend on the clock; the later line of a step counts."""
    found = {}
    for step, record in metrics.read(folder / "metrics.jsonl").items():
        kept = {key: value for key, value in record.items() if key not in CLOCKS and not key.startswith("time/")}
        if len(kept) > 2:  # more than step and tokens
            found[step] = kept
    return found


def digests(folder: pathlib.Path, step: int | None = None) -> dict[str, int]:
    """The digests of the arrays of a checkpoint, of the last one if no step is given."""
    path = folder / "checkpoints" / str(step or steps(folder)[-1]) / "meta/metadata"
    return json.loads(path.read_text())["digests"]
