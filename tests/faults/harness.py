"""Runs training as a user does, in processes of its own, makes things fail around it, and compares what it leaves behind.

`Place` holds the data, the compile cache and a run that nothing happened to. `Place.start` begins a run; rules for the
shim (shim.c) make file operations of that run fail while they stand in its file of rules.
"""

import dataclasses
import functools
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from jaxlm.train import metrics

STEPS = 24
EVERY = 4  # steps from one checkpoint to the next
KEYS = {
    "model.n_layers": 2, "model.d_model": 64, "model.n_heads": 4, "model.d_ff": 128, "model.vocab_size": 384,
    "train.steps": STEPS, "train.batch_size": 8, "train.seq_len": 64, "train.eval_every_steps": 0,
    "eval.batch_size": 8, "eval.max_batches": 1, "checkpoint.every_steps": EVERY, "checkpoint.every_minutes": 0,
    "checkpoint.reserve_mb": 0, "optim.warmup_steps": 4, "log.every_steps": 1, "log.tensorboard": False,
    "data.val_fraction": 0.1, "runs.supervise": "off", "runs.backoff_s": 0,
}  # fmt: skip
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


@dataclasses.dataclass
class Started:
    """A run that goes on.

    Attributes:
      process: the process that was started.
      folder: the run's folder.
      rules: the file of rules for the shim; None without faults of the disk.
    """

    process: subprocess.Popen
    folder: pathlib.Path
    rules: pathlib.Path | None

    def fault(self, *rules: str) -> None:
        """From now on these rules count, such as "write ENOSPC checkpoints/"; without any, all works again."""
        part = self.rules.with_suffix(".part")
        part.write_text("".join(f"{rule}\n" for rule in rules))
        part.rename(self.rules)

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

    def saved(self) -> list[int]:
        """The steps whose folders are there."""
        return steps(self.folder)

    def text(self) -> str:
        """What the run has said so far."""
        return pathlib.Path(f"{self.folder}.txt").read_text(errors="replace")

    def end(self, code: int | None = 0, seconds: float = 180) -> str:
        """Waits until the run ends with this exit code (None: with any), and returns what it said."""
        try:
            found = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            raise AssertionError(f"no end within {seconds} s: {self.text()[-3000:]}") from None
        assert code is None or found == code, f"exit code {found} in place of {code}: {self.text()[-4000:]}"
        return self.text()


def steps(folder: pathlib.Path) -> list[int]:
    """The steps of the checkpoints in a run's folder."""
    found = (folder / "checkpoints").glob("*") if (folder / "checkpoints").is_dir() else ()
    return sorted(int(path.name) for path in found if path.name.isdigit())


class Place:
    """A folder with data, a compile cache and runs.

    Args:
      root: an empty folder.
    """

    def __init__(self, root: pathlib.Path):
        self.root = root
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
        keys = KEYS | {"workdir": self.root / name, "hardware.compile_cache": self.root / "cache"}
        keys |= {key.replace("__", "."): value for key, value in overrides.items()}
        flags = [f"--config.{key}={value}" for key, value in keys.items()]
        return [sys.executable, "-m", "jaxlm.main", f"--config={self.root / 'tiny.py'}", *flags]

    def start(
        self,
        name: str,
        *,
        devices: int = 1,
        rules: tuple[str, ...] | None = None,
        env: dict | None = None,
        **overrides: object,
    ) -> Started:
        """Begins a run in the background.

        Args:
          name: of the run's folder; what it says goes to NAME.txt beside it.
          rules: for the shim from the start on; () for a shim that does nothing yet; None for none.
        """
        folder = self.root / name
        environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"} | (env or {})
        file = None
        if rules is not None:
            file = self.root / f"{name}.rules"
            file.write_text("".join(f"{rule}\n" for rule in rules))
            environment |= {"LD_PRELOAD": str(shim()), "FAULTS": str(file)}
        with open(f"{folder}.txt", "a") as said:
            process = subprocess.Popen(
                self.command(name, **overrides), env=environment, stdout=said, stderr=said, stdin=subprocess.DEVNULL
            )
        return Started(process, folder, file)

    def several(
        self, name: str, n: int = 2, devices: int = 1, rules: dict[int, tuple[str, ...]] | None = None, **overrides
    ):
        """Begins one run as `n` processes, and returns them. `rules`: for the shim, by process."""
        with socket.socket() as s:
            s.bind(("localhost", 0))
            port = s.getsockname()[1]
        keys = {"distributed__coordinator": f"localhost:{port}", "distributed__num_processes": n}
        started = []
        for i in range(n):
            one = self.start(
                name, devices=devices, rules=(rules or {}).get(i), distributed__process_id=i, **keys, **overrides
            )
            started.append(one)
        return started

    def run(self, name: str, *, code: int = 0, **options: object) -> str:
        """Runs to the end, and returns what it said."""
        return self.start(name, **options).end(code)

    @functools.cached_property
    def whole(self) -> pathlib.Path:
        """The folder of a run that nothing happened to."""
        self.run("whole")
        return self.root / "whole"

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


def digests(folder: pathlib.Path, step: int = STEPS) -> dict[str, int]:
    """The digests of the arrays of a checkpoint, as it was saved and, if it is sealed, read back."""
    return json.loads((folder / "checkpoints" / str(step) / "meta/metadata").read_text())["digests"]
