"""Checks whether two commits train the same model, bit for bit: `python scripts/same_bits.py OLD [NEW]`.

    python scripts/same_bits.py main~1                       # against HEAD
    python scripts/same_bits.py main~1 . --cases muon,zloss  # against the files in this folder, committed or not
    python scripts/same_bits.py main~1 . --keep /tmp/bits    # keeps the runs; OLD's are not run a second time

Each side runs from its own git worktree (a folder runs in place); the sides share only this script's Python and packages. Each
side makes its data from the quickstart's corpus and trains every case. Both must have the same manifest, the same numbers in
metrics.jsonl at every step (except clocks), and the same bytes in every array of the last checkpoint. Prints a line per case;
exit code 1 if a case differs or fails, 2 if the first case fails.

Bits are the same on one machine only: another processor, or another JAX, adds in another order. So nothing is compared with
results from elsewhere, and results are kept for one machine and one JAX.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

import tensorstore

ROOT = pathlib.Path(__file__).resolve().parents[1]
CLOCKS = {"start", "time", "goodput", "wall_s", "cost_usd", "tokens_per_second", "mfu_palm", "mfu_causal", "eta_s"}
COMMON = {
    "log.every_steps": 1,
    "log.tensorboard": False,
    "hardware.compile_cache": "",
    "sample.prompts": "()",
    "eval.at_start": True,
}
QUICKSTART = {"train.steps": 60, "train.eval_every_steps": 20, "checkpoint.every_steps": 30, "eval.max_batches": 32}
SMALL = {
    "train.steps": 12,
    "train.batch_size": 8,
    "train.seq_len": 128,
    "train.eval_every_steps": 5,
    "checkpoint.every_steps": 6,
    "optim.name": "adamw",
    "optim.lr": 3e-3,
    "optim.b2": 0.95,
    "optim.warmup_steps": 4,
    "model.n_layers": 2,
    "model.d_model": 64,
    "model.n_heads": 4,
    "model.n_kv_heads": 2,
    "model.qk_norm": False,
    "model.d_ff": 128,
    # What older commits call it, and all read alike: the same held-out rows on both sides.
    "eval.max_batches": 1,
}
# Name -> devices, overrides.
CASES = {
    "quickstart": (1, QUICKSTART),
    "data2_fsdp4": (8, SMALL | {"mesh.data": 2, "mesh.fsdp": 4}),
    "tensor2": (2, SMALL | {"mesh.data": 1, "mesh.tensor": 2}),
    "context2": (2, SMALL | {"mesh.data": 1, "mesh.context": 2}),
    "tiles": (1, SMALL | {"train.microbatch_size": 2, "loss.tile_tokens": 64}),  # four microbatches of four tiles
    "scan_remat": (1, SMALL | {"model.scan_layers": True, "model.remat": "full"}),
    "muon": (1, SMALL | {"optim.name": "muon"}),
    "adamw8bit": (1, SMALL | {"optim.name": "adamw8bit"}),
    "gpt2_dropout": (1, SMALL | {"model.family": "gpt2", "model.n_kv_heads": 0, "model.dropout": 0.1}),
    "zloss": (1, SMALL | {"loss.z_loss": 1e-3}),
}


class CannotRunError(Exception):
    """A side does not train, or a commit does not exist."""


@dataclasses.dataclass(frozen=True)
class Side:
    """One of the two trees: the code in `tree`; runs, data and results under `place`; `commit` is "" for a folder."""

    name: str
    tree: pathlib.Path
    place: pathlib.Path
    commit: str


class Processes:
    """Runs commands from several threads, and ends them all when the script is interrupted."""

    def __init__(self):
        self._running: set[subprocess.Popen] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def run(self, command: list[str], folder: pathlib.Path, env: dict, log: pathlib.Path) -> int:
        """Runs a command with its output in `log`; returns its exit code."""
        with open(log, "wb") as out, self._lock:
            if self._stopped:
                return -1
            # Its own session: Ctrl-C reaches only this script, which then ends the run.
            process = subprocess.Popen(
                command, cwd=folder, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
            self._running.add(process)
        try:
            return process.wait()
        finally:
            with self._lock:
                self._running.discard(process)

    def stop(self) -> None:
        """Kills all running commands, and lets no more start."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                os.killpg(process.pid, signal.SIGKILL)  # also the workers that make the data


def git(*args: str) -> str:
    """Returns a git command's output in this repository. Raises CannotRunError."""
    done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise CannotRunError(f"git {' '.join(args)}: {done.stderr.strip()}")
    return done.stdout.strip()


@contextlib.contextmanager
def open_side(name: str, what: str, scratch: pathlib.Path, keep: pathlib.Path | None):
    """Yields the side for `what`, a folder or a commit; removes a worktree made for it at the end."""
    folder = pathlib.Path(what)
    if (folder / "jaxlm").is_dir():
        place = scratch / name if keep is None else keep / name
        shutil.rmtree(place, ignore_errors=True)  # a folder's files change, so its kept results are outdated
        yield Side(name, folder.resolve(), place, "")
        return
    commit = git("rev-parse", "--verify", f"{what}^{{commit}}")
    place, tree = scratch / name if keep is None else keep / commit, scratch / f"tree-{name}"
    git("worktree", "add", "--quiet", "--detach", str(tree), commit)
    try:
        yield Side(name, tree, place, commit)
    finally:
        git("worktree", "remove", "--force", str(tree))


def manifest_digest(path: pathlib.Path) -> str:
    """Returns a digest of the data: sha256 of all shards and of the tokenizer, counts, mixture.

    Leaves out the sha256 of prepared.json, which depends on the code of `jaxlm prepare` too; the shards show its output.
    """
    manifest = json.loads(path.read_bytes())
    manifest["recipe"].pop("prepared", None)
    manifest.pop("held_out", None)  # hashes that commits before 28 November 2026 did not write
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def train(side: Side, case: str, processes: Processes) -> dict:
    """Returns a case's result on one side, kept from before for the same commit, machine and settings, or by a new run.

    Returns {"manifest": sha256, "metrics": {step: {name: number}}, "arrays": {name: "dtype shape sha256"}, "step": of the
    checkpoint, "seconds"}.
    """
    devices, overrides = CASES[case]
    workdir, kept = side.place / case, side.place / f"{case}.json"
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "numpy")]
    settings = {"devices": devices, "overrides": COMMON | overrides, "machine": [platform.node(), os.cpu_count()]}
    settings |= {"packages": versions, "python": platform.python_version()}
    if side.commit and kept.is_file() and (found := json.loads(kept.read_text()))["settings"] == settings:
        return found | {"seconds": 0.0}
    shutil.rmtree(workdir, ignore_errors=True)
    workdir.mkdir(parents=True)
    keys = COMMON | overrides | {"workdir": workdir.resolve(), "data.dir": (side.place / "data").resolve()}
    command = [sys.executable, "-m", "jaxlm.main", "--config=configs/quickstart.py"]
    command += [f"--config.{key}={value}" for key, value in keys.items()]
    # The shell's settings of JAX and XLA might have another meaning on one side.
    env = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_", "PYTHON"))}
    env |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "PYTHONPATH": str(side.tree)}
    start, log = time.monotonic(), side.place / f"{case}.log"
    if code := processes.run(command, side.tree, env, log):
        end = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise CannotRunError(f"{case} of {side.name}: exit code {code}\n{end}")
    steps = [int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdigit()]
    result = {
        "settings": settings,
        "manifest": manifest_digest(side.place / "data/manifest.json"),
        "metrics": metrics(workdir / "metrics.jsonl"),
        "step": max(steps),
        "arrays": arrays(workdir / "checkpoints" / str(max(steps))),
        "seconds": time.monotonic() - start,
    }
    kept.write_text(json.dumps(result))
    return result


def metrics(path: pathlib.Path) -> dict[str, dict]:
    """Returns step -> the metrics of all its lines except clocks; lines may be in any order."""
    steps: dict[str, dict] = {}
    for record in map(json.loads, path.read_text().splitlines()):
        kept = {k: v for k, v in record.items() if k not in CLOCKS and not k.startswith("time/")}
        if kept.keys() - {"step", "tokens"}:
            steps.setdefault(str(record["step"]), {}).update(kept)
    return steps


def arrays(checkpoint: pathlib.Path) -> dict[str, str]:
    """Returns name -> dtype, shape and sha256 of every array in a checkpoint, read without the project's code."""
    found = {}
    for item in sorted(p.parent for p in checkpoint.glob("*/manifest.ocdbt")):
        store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{item.resolve()}/"}}
        keys = tensorstore.KvStore.open(store).result().list().result()
        names = {key.decode().removesuffix("/.zarray") for key in keys if key.endswith(b"/.zarray")}
        for name in sorted(names):
            spec = {"driver": "zarr", "kvstore": store | {"path": f"{name}/"}}
            x = tensorstore.open(spec, open=True).result().read().result()
            shape = "x".join(map(str, x.shape)) or "scalar"
            found[f"{item.name}/{name}"] = f"{x.dtype} {shape} {hashlib.sha256(x.tobytes()).hexdigest()[:16]}"
    if not found:
        raise CannotRunError(f"no arrays in {checkpoint}")
    return found


def differences(old: dict, new: dict) -> list[str]:
    """Returns lines on where two results differ, the earliest step first."""
    pairs = [("manifest of the data", old["manifest"], new["manifest"])]
    for step in sorted(old["metrics"].keys() | new["metrics"].keys(), key=int):
        a, b = old["metrics"].get(step, {}), new["metrics"].get(step, {})
        pairs += [(f"step {step} {name}", a.get(name, "absent"), b.get(name, "absent")) for name in sorted(a | b)]
    pairs.append(("step of the last checkpoint", old["step"], new["step"]))
    a, b = old["arrays"], new["arrays"]
    pairs += [(f"array {name}", a.get(name, "absent"), b.get(name, "absent")) for name in sorted(a | b)]
    return [f"{what}: {x} -> {y}" for what, x, y in pairs if x != y]


def report(case: str, old: dict, new: dict) -> bool:
    """Prints the line of a case; returns True if both sides are equal."""
    found = differences(old, new)
    numbers, seconds = sum(map(len, old["metrics"].values())), f"{old['seconds']:.0f} + {new['seconds']:.0f} s"
    if not found:
        said = f"equal: {numbers} numbers, {len(old['arrays'])} arrays"
    else:
        said = f"DIFFERENT in {len(found)} places, first {found[0]}"
        if len(found) > 1 and (array := next((f for f in found[1:] if f.startswith("array ")), "")):
            said += f"; {array}"
    print(f"{case:<13} {said}  ({seconds})", flush=True)
    return not found


def compare(sides: list[Side], cases: list[str], jobs: int, processes: Processes) -> bool:
    """Runs the cases of both sides, `jobs` at a time, and prints a line for each; returns True if all are equal."""
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        try:
            # The first case of a side makes its data; the others share it.
            first = [pool.submit(train, side, cases[0], processes) for side in sides]
            equal = report(cases[0], *(future.result() for future in first))
            rest = {case: [pool.submit(train, side, case, processes) for side in sides] for case in cases[1:]}
            for case, futures in rest.items():
                try:
                    equal &= report(case, *(future.result() for future in futures))
                except CannotRunError as error:  # the other cases still run
                    print(f"{case:<13} FAILED {error}", flush=True)
                    equal = False
        except BaseException:
            processes.stop()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return equal


def interrupt(number: int, frame) -> None:
    """Ends the script on SIGTERM as on Ctrl-C: kills runs, removes worktrees."""
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="a commit, or a folder that holds a checkout")
    parser.add_argument("new", nargs="?", default="HEAD", help="the same; HEAD by default")
    parser.add_argument("--cases", default=",".join(CASES), help="some of them, with commas; default: %(default)s")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time; default 2, one of each side")
    parser.add_argument("--keep", type=pathlib.Path, help="keep runs and results here, and use a commit's again")
    args = parser.parse_args()
    cases = [case for case in CASES if case in args.cases.split(",")]
    if unknown := set(args.cases.split(",")) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    signal.signal(signal.SIGTERM, interrupt)
    processes, start = Processes(), time.monotonic()
    with contextlib.ExitStack() as stack:
        scratch = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="same_bits_")))
        try:
            sides = [
                stack.enter_context(open_side(name, what, scratch, args.keep))
                for name, what in (("old", args.old), ("new", args.new))
            ]
            if sides[0].place == sides[1].place:  # the same commit runs twice, to test the machine
                sides[1] = dataclasses.replace(sides[1], place=sides[1].place / "again")
            equal = compare(sides, cases, args.jobs, processes)
        except CannotRunError as error:
            print(error, file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
    print(f"{'equal' if equal else 'DIFFERENT'}, {math.ceil(time.monotonic() - start)} s")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
