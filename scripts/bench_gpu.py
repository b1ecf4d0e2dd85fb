"""Checks and times jaxlm on one GPU, and PyTorch on the same card: `python scripts/bench_gpu.py`.

Runs these sections in this order, each part in its own process, and prints the table last:

    attention   every backend against float32 (output, gradients, isolation of documents), and its time
    sweep       microbatch x loss tile x remat for a few steps each, with the fastest backend that passed
    jaxlm       200 steps of the best on packed documents through the product's loader, as a second start
    torch       the hand-written torch.compile Llama (scripts/peers/torch_llama.py), then `hf`, Hugging Face's
    h128, 3b, accumulate           heads of 128; the 3.12B model; a batch of 128 rows
    muon        the step with AdamW and with Muon, 131k and 262k tokens: the base of the recipe's dollars
    flags       XLA flags, one at a time, against none
    fp8         the MLP in float8
    decode, serve                  greedy tokens of 1, 8 and 64 rows; of 1 to 8 clients, with their waits, without HTTP
    sft, grpo   `jaxlm train sft` and grpo, as a user runs them, from a base of two steps on made text

The model is configs/gpuburnout_1b.py at 2,048 tokens in bfloat16. In the compiled program every layer's attention must use
fused kernels, or its row fails. Five calls of nine minutes should run everything. On an H100 (dev/LEADERBOARD.md) fp8 had no
result within 224 s, so it has its own call; 3b ran on the H100, h128, accumulate and muon on an H200; flags and the last four
not yet:

    python scripts/bench_gpu.py --minutes=9 --out=bench.json
    python scripts/bench_gpu.py --minutes=9 --out=bench.json --sections h128 3b accumulate flags
    python scripts/bench_gpu.py --minutes=9 --out=bench.json --sections muon
    python scripts/bench_gpu.py --minutes=9 --out=bench.json --sections fp8
    python scripts/bench_gpu.py --minutes=9 --out=bench.json --sections decode serve sft grpo

`--out` gets each section's rows when the section ends, so that a later call reads the best settings from the file, and its
table has all rows. `--sections` without a name prints the file's table. After `--minutes` the running part is killed with its
children. Ctrl-C and SIGTERM end the running part. In each case the table is printed, with the rows so far.

A machine without network needs the wheels of array-record, cloudpickle, grain, ml-collections, portpicker,
pyarrow and sentencepiece besides its own Python 3.12, JAX 0.11, flax, optax, Orbax, PyTorch and transformers. The backend
tokamax needs the wheels that `pip download tokamax` fetches under that Python: some forty more. decode, serve, sft and grpo
need the rest of jaxlm's packages too.

`--smallest` runs every part on small shapes on the CPU in minutes, as a test. Copy the rows to dev/LEADERBOARD.md with the
commit, the card and its power limit, and the settings that passed to docs/performance.md.
"""

import argparse
import contextlib
import json
import math
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
import typing

PRETRAINING = ("attention", "sweep", "jaxlm", "torch", "hf", "h128", "3b", "accumulate", "muon", "flags", "fp8")
ORDER = (*PRETRAINING, "decode", "serve", "sft", "grpo")
# What a section's part plans for; one that compiles for long may take SLACK more. Neither goes beyond --minutes.
SECONDS = dict.fromkeys(ORDER, 100.0) | {
    "attention": 60.0,
    "sweep": 150.0,
    "jaxlm": 120.0,
    "flags": 150.0,
    "fp8": 450.0,
    "sft": 200.0,
    "grpo": 300.0,
}
SLACK = 60.0
EACH = 60.0  # of a section with several parts
# Candidates for hardware.xla_flags.
FLAG_CANDIDATES = (
    "xla_gpu_enable_triton_gemm=false",
    "xla_gpu_enable_command_buffer=",
    "xla_gpu_autotune_level=2",
    "xla_gpu_enable_latency_hiding_scheduler=true",
    "xla_gpu_enable_cublaslt=true",
    "xla_gpu_graph_min_graph_size=1",
)
# Of the section muon: as in gpuburnout_1b, and as in speed_1b with two rates.
OPTIMIZERS = {
    "adamw": {"optim.name": "adamw"},
    "muon": {"optim.name": "muon", "optim.rates": ("layers_.*/kernel 0.5",), "optim.decay_follows_rate": True},
}
HERE = pathlib.Path(__file__).resolve().parent
PROGRAM = (sys.executable, str(HERE / "bench_gpu_parts.py"))
NO_CARD = {"name": "no NVIDIA GPU"}


def options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything: a part that still runs is killed")
    parser.add_argument("--sections", nargs="*", choices=ORDER, default=list(ORDER))
    parser.add_argument("--steps", type=int, default=200, help="timed steps of the main rows; others take a quarter")
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("bench_gpu.json"),
        help="rows so far; a later call goes on from them",
    )
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--tiny", action="store_true", help="small shapes, few steps")
    parser.add_argument("--eager", action="store_true", help="PyTorch without torch.compile")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of configs/base.py")
    parser.add_argument("--smallest", action="store_true", help="--device=cpu --tiny --eager --steps=4")
    args = parser.parse_args(argv)
    if args.smallest:
        args.device, args.tiny, args.eager, args.steps = "cpu", True, True, 4
    args.card = card() if args.device == "gpu" else NO_CARD
    if args.device == "gpu" and args.card == NO_CARD and args.sections:
        parser.error("no NVIDIA GPU here (nvidia-smi finds none): try it on the CPU with --smallest")
    return args


def card() -> dict[str, str]:
    """Returns the card's name, power limit and driver version, as the driver reports them."""
    names = ("name", "power.limit", "driver_version")
    try:
        query = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
        return dict(zip(names, done.stdout.strip().splitlines()[0].split(", "), strict=False))
    except (OSError, subprocess.SubprocessError, IndexError):
        return NO_CARD


def say(line: str, file: typing.TextIO | None = None) -> None:
    """Prints a line. A closed output is ignored, so that the rows still reach --out."""
    with contextlib.suppress(OSError):
        print(line, file=file or sys.stdout, flush=True)


def number(row: dict, key: str) -> float:
    """Returns a row's figure; 0 if it has none."""
    value = row.get(key)
    return float(value) if type(value) in (int, float) and math.isfinite(value) else 0.0


def readable(row: typing.Any, label: str) -> dict:
    """Returns the row if it has all that the table needs, else a failed row that shows its content."""
    if isinstance(row, dict) and isinstance(row.get("keys", {}), dict):
        timed = isinstance(row.get("what"), str) and ("failed" in row or number(row, "tokens/s") > 0)
        if timed or isinstance(row.get("backend"), str):
            return row
    return {"what": label, "failed": f"unreadable row: {row!s:.160}"}


def read_rows(path: pathlib.Path, label: str) -> list[dict]:
    """Returns the rows that a part wrote, one per line; the last may be cut off if the part was killed."""
    rows = []
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else []:
        try:
            rows.append(readable(json.loads(line), label))
        except ValueError:
            rows.append(readable(line, label))
    return rows


def read_results(path: pathlib.Path) -> dict:
    """Returns the file of earlier calls: {"made with": ..., section: rows}; {} if missing. Exits if the file is not ours."""
    if not path.exists():
        return {}
    try:
        state = json.loads(path.read_text())
        return {"made with": state["made with"]} | {
            name: [readable(row, name) for row in state[name]] for name in ORDER if name in state
        }
    except (OSError, ValueError, TypeError, KeyError) as error:
        sys.exit(f"{path} holds no results of this script ({error!r:.80}): move it away, or give another --out")


def run(command: list[str], env: dict[str, str], said: pathlib.Path, go_on: typing.Callable[[], bool]) -> int | None:
    """Runs a command in its own process group, with its output in the file `said`.

    Returns:
      The exit code; None if `go_on` returned False first. The whole group is killed in both cases, because processes that a
      part leaves running would slow the next part.
    """
    with said.open("wb") as output:
        # A file, not a pipe: a child that holds a pipe open would keep the reader waiting after the part has ended.
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        while process.poll() is None and go_on():
            time.sleep(0.05)
        return process.returncode
    finally:
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGKILL)  # no SIGTERM first: JAX swallows it
            process.wait(5)  # with a limit: if the driver hangs, even a killed process stays


class Bench:
    """Runs parts one after another, keeps their rows in a file, and knows the best settings so far.

    `program` is a part's command; its arguments are the work as JSON and the file for the rows.
    """

    def __init__(self, args: argparse.Namespace, program: typing.Sequence[str] = PROGRAM):
        self.args, self.program = args, program
        self.end = time.monotonic() + 60 * args.minutes
        self.least = 5.0 if args.tiny else 30.0  # seconds that a part needs to begin
        self.stopped = 0  # the signal that asked for the end
        self.out = args.out.resolve()
        self.written = True
        made_with = {"card": args.card, "tiny": args.tiny, "set": args.set}
        self.state = read_results(self.out) or {"made with": made_with}
        if not args.sections:
            return
        if self.state["made with"] != made_with:
            sys.exit(f"{args.out} has figures of {self.state['made with']}, this is {made_with}: give another --out")
        self.write()
        if not self.written:
            sys.exit("give another --out")

    def left(self) -> float:
        return self.end - time.monotonic()

    def stop(self, signum: int, frame: types.FrameType | None = None) -> None:
        """Signal handler: ends the running part, and lets no other part begin."""
        self.stopped = signum

    def part(self, kind: str, label: str, limit: float, flags: str = "", **asked) -> list[dict]:
        """Runs one part in its own process; returns its rows, or a row that says why there are none."""
        began, a = time.monotonic(), self.args
        work = {"kind": kind, "label": label, "steps": a.steps, "tiny": a.tiny, "eager": a.eager, "set": a.set, **asked}
        work["script"] = os.getpid()
        # By a clock that all processes share. Near the end a part plans for less time than is left: late rows are lost.
        work["until"] = min(began + limit, self.end - 0.1 * self.left())
        ends = min(began + limit + SLACK, self.end)
        said, rows, code = "", [], None
        try:
            # A killed part's temporary folder is inside ours, and is deleted with it.
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                result, output = pathlib.Path(folder, "rows.jsonl"), pathlib.Path(folder, "output")
                command = [*self.program, json.dumps(work), str(result)]
                env = self.environment(kind, flags) | {"TMPDIR": folder}
                code = run(command, env, output, lambda: not self.stopped and time.monotonic() < ends)
                said, rows = output.read_text(errors="replace"), read_rows(result, label)
                if code and not said and shutil.disk_usage(folder).free < 1 << 20:
                    said = f"no room left in {tempfile.gettempdir()} (TMPDIR)"
        except OSError as error:  # a full disk, say: the rows of other parts must survive
            code, said = 1, str(error)
        seconds = time.monotonic() - began
        if code != 0 or not rows:
            lines = [line for line in said.splitlines() if line.strip()]
            rows.append(
                {"what": label, "failed": f"{self.why(code, seconds)}: {(lines or ['nothing said'])[-1][:200]}"}
            )
            say("\n".join(lines[-15:]), sys.stderr)
        for row in rows:
            say(json.dumps(row))
        say(f"[{label}: {seconds:.0f} s, {self.left():.0f} s left]")
        return rows

    def environment(self, kind: str, flags: str) -> dict[str, str]:
        """Returns the environment variables of a part."""
        env, caches = dict(os.environ), pathlib.Path(tempfile.gettempdir())
        env["PYTHONPATH"] = os.pathsep.join(p for p in (str(HERE.parent), env.get("PYTHONPATH", "")) if p)
        # All parts and calls share a compilation cache, so `first_step_s` of `jaxlm` is that of a second start.
        env.setdefault("JAX_COMPILATION_CACHE_DIR", str(caches / "jaxlm_bench_xla"))
        env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(caches / "jaxlm_bench_torch"))
        if flags:
            env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} --{flags}".strip()
        if kind in ("torch", "hf"):
            env["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # PyTorch uses the card there
        if self.args.device == "cpu":
            env |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        return env

    def why(self, code: int | None, seconds: float) -> str:
        """Returns why a part gave no rows, or only some."""
        if code is not None:
            return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return signal.Signals(self.stopped).name if self.stopped else f"no end within {seconds:.0f} s"

    def keep(self, section: str, rows: list[dict]) -> None:
        self.state[section] = rows
        self.write()

    def write(self) -> None:
        """Replaces --out by the present rows. If that fails, says so; the table is printed all the same."""
        new = self.out.with_name(self.out.name + ".new")
        try:
            if self.out.exists() and not self.out.is_file():
                raise OSError(0, "not a file")
            new.write_text(json.dumps(self.state, indent=1))
            new.replace(self.out)
            self.written = True
        except OSError as error:
            self.written = False
            say(f"[{self.args.out} can't be written: {error.strerror}]", sys.stderr)
            with contextlib.suppress(OSError):
                new.unlink()

    def backend(self) -> str:
        """Returns the fastest attention backend that passed its checks, else the one that `auto` takes."""
        passed = [row for row in self.state.get("attention", []) if row.get("ok") is True and number(row, "ms")]
        return min(passed, key=lambda row: row["ms"])["backend"] if passed else "auto"

    def best(self) -> dict:
        """Returns the settings of the sweep's fastest candidate."""
        rows = [row for row in self.state.get("sweep", []) if number(row, "tokens/s") and "keys" in row]
        keys = max(rows, key=lambda row: row["tokens/s"])["keys"] if rows else {"loss.tile_tokens": 4096}
        return {"model.attention": self.backend(), **keys}

    def section(self, name: str) -> list[dict]:
        best, limit = self.best(), SECONDS[name]
        few = max(self.args.steps // 4, 3)
        if name in ("attention", "decode", "serve", "sft", "grpo"):
            return self.part(name, name, limit)
        if name == "sweep":
            return self.part("sweep", name, limit, backend=self.backend())
        if name == "jaxlm":
            return self.part("jaxlm", "jaxlm 1.04B", limit, keys=best)
        if name in ("torch", "hf"):
            who = {"torch": "PyTorch by hand", "hf": "Hugging Face"}[name]
            label = f"{who}, {'eager' if self.args.eager else 'torch.compile'}, 1.04B"
            return self.part(name, label, limit, steps=few)
        if name == "fp8":
            return self.part("jaxlm", "jaxlm 1.04B fp8", limit, keys=best | {"model.fp8": True}, steps=few)
        if name == "h128":
            return self.part("jaxlm", "jaxlm 1.04B h128", limit, keys=best, model="gpuburnout_1b_h128", steps=few)
        if name == "3b":
            small = {"train.microbatch_size": 8, "model.remat": "names"}
            return self.part("jaxlm", "jaxlm 3.12B", limit, keys=best | small, model="gpuburnout_3b", steps=few // 2)
        if name == "accumulate":
            whole = {"train.batch_size": 8 if self.args.tiny else 128}
            return self.part("jaxlm", "jaxlm 1.04B, 128 rows a step", limit, keys=best | whole, steps=few // 4 + 2)
        if name == "muon":
            batches = (4, 8) if self.args.tiny else (64, 128)
            asked = [
                (
                    f"{optimizer}, {batch} rows a step",
                    {"keys": best | {"train.batch_size": batch, **keys}, "steps": few},
                )
                for batch in batches
                for optimizer, keys in OPTIMIZERS.items()
            ]
        elif name == "flags":
            flags = FLAG_CANDIDATES[: 2 if self.args.tiny else None]
            asked = [(flag or "no flag", {"flags": flag, "keys": best, "steps": 20}) for flag in ("", *flags)]
        else:
            raise ValueError(f"no section {name}")
        rows = []
        for label, settings in asked:
            if rows and (self.stopped or self.left() < self.least):
                break
            rows += self.part("jaxlm", f"jaxlm 1.04B {label}", EACH, **settings)
        return rows

    def sections(self) -> bool:
        """Runs the sections asked for, as far as time allows. Returns True if no row failed."""
        good = True
        for name in (name for name in ORDER if name in self.args.sections):
            if self.stopped or self.left() < self.least:
                say(f"[{'stopped before' if self.stopped else 'no time left for'} {name}]")
                continue
            rows = self.section(name)
            good = good and not any("failed" in row or row.get("ok") is False for row in rows)
            if self.stopped and name in self.state and all("failed" in row for row in rows):
                continue  # stopped before its first row: keeps an earlier call's rows
            self.keep(name, rows)
        return good

    def table(self) -> None:
        """Prints the newest rows of each section, with the ratio of each of our rows to the fastest peer's."""
        say(f"\n{json.dumps(self.state['made with'])}")
        rows = {name: self.state.get(name, []) for name in ORDER}
        peers = [row for name in ("torch", "hf") for row in rows[name] if "failed" not in row]
        peer = max(peers, key=lambda row: number(row, "tokens/s"), default=None)
        pairs = [(name, row) for name in ORDER for row in rows[name]]
        for section, row in pairs:
            if "failed" in row:
                say(f"{row['what']}: FAILED {row['failed']}")
                continue
            what = row.get("what", "")
            ours = section in PRETRAINING and what.startswith("jaxlm 1.04B") and "h128" not in what
            more = ratio(row, peer) if peer and ours else {}
            say("  ".join(f"{key} {value}" for key, value in (row | more).items() if key != "keys"))


def ratio(row: dict, peer: dict) -> dict[str, str]:
    """Returns our tokens/s over the peer's; a note says if the two had different rows per step."""
    ours, theirs = (each.get("rows a step", each.get("rows")) for each in (row, peer))
    other = "" if ours == theirs else f" ({ours} rows a step to {theirs} of {peer['what']})"
    return {"ratio": f"{round(number(row, 'tokens/s') / number(peer, 'tokens/s'), 3)}{other}"}


def main(argv: list[str] | None = None, program: typing.Sequence[str] = PROGRAM) -> int:
    """Returns 0 if no row failed and --out has the rows; 128 + the signal if a signal ended the script."""
    bench = Bench(options(argv), program)
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(one) is not signal.SIG_IGN:  # nohup ignores SIGHUP: leave it so
            signal.signal(one, bench.stop)
    good = False
    try:
        good = bench.sections()
    finally:
        bench.table()
    return 128 + bench.stopped if bench.stopped else int(not (good and bench.written))


if __name__ == "__main__":
    sys.exit(main())
