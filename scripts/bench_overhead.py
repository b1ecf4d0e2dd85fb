"""Measures what the loop, the loader and checkpoints cost besides the steps: `python scripts/bench_overhead.py`.

Runs the real loop with the real loader (shards of scripts/bench_loader.py), metrics and Orbax checkpoints of a random state,
around a synthetic device. Its step sleeps as long as a step of `gpuburnout_1b` takes at 90,000 tokens/s (128 x 2,048 tokens:
2.9 s), and steps run one after the other, as in a GPU's queue. The overhead is the share of time in which the device is idle.
The run has two checkpoints, the first of which also compiles its digests. The cost of the second is counted as often as the
config's `checkpoint.every_steps` says, and scaled in proportion to a state of `--scale-gb` (an upper bound, since its fixed
part is scaled too).
"""

import argparse
import collections
import dataclasses
import json
import os
import pathlib
import queue
import statistics
import tempfile
import threading
import time
import typing

import bench_loader
import jax.numpy as jnp
import numpy as np

from jaxlm.config import Config, resolve
from jaxlm.config.config_files import load
from jaxlm.data.batches import document_rows, loader
from jaxlm.data.shards import shards
from jaxlm.devices import sharding
from jaxlm.run import clock as clock_lib
from jaxlm.run import metrics, signals
from jaxlm.run.checkpoints import digest
from jaxlm.run.checkpoints.store import Checkpointer
from jaxlm.step.objectives import base
from jaxlm.step.state import TrainState
from jaxlm.train import hooks, loop, stability, watches
from jaxlm.train.batches import LoaderBatches
from jaxlm.train.recorder import Meter, Recorder


class Device(threading.Thread):
    """Runs steps of `seconds` in the order in which they were sent; records when each began and ended."""

    def __init__(self, seconds: float):
        super().__init__(daemon=True)
        self._seconds, self._sent, self.times = seconds, queue.SimpleQueue(), []

    def send(self) -> threading.Event:
        """Sends a step; the event is set when it has run."""
        done = threading.Event()
        self._sent.put(done)
        return done

    def run(self) -> None:
        while (done := self._sent.get()) is not None:
            began = time.perf_counter()
            time.sleep(self._seconds)
            self.times.append((began, time.perf_counter()))
            done.set()

    def stop(self) -> None:
        self._sent.put(None)
        self.join()

    def gaps(self) -> list[float]:
        """Returns the idle seconds between each step and the next."""
        return [max(0.0, b[0] - a[1]) for a, b in zip(self.times, self.times[1:], strict=False)]


class Metric:
    """A scalar metric that is available once its step has run."""

    def __init__(self, value: float, done: threading.Event):
        self._value, self._done = value, done

    def copy_to_host_async(self) -> None:
        """Copies nothing: the value is on the host already."""

    def __float__(self) -> float:
        self._done.wait()
        return self._value


class Saver(Checkpointer):
    """Saves once the device has reached the step, as reading the state would wait; records how long each save blocks."""

    def __init__(self, *args, last: typing.Callable[[], threading.Event]):
        super().__init__(*args)
        self._last, self.blocked = last, []

    def save(self, state: TrainState, meta: dict) -> bool:
        self._last().wait()
        began = time.perf_counter()
        saved = super().save(state, meta)
        self.blocked.append(time.perf_counter() - began)
        return saved


class Clock:
    """Adds up the seconds spent in functions, by part."""

    def __init__(self):
        self.seconds, self.notes = collections.Counter(), []

    def timed(self, part: str, function: typing.Callable) -> typing.Callable:
        def wrapped(*args, **kwargs):
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - began

        return wrapped

    def noted(self, part: str, function: typing.Callable) -> typing.Callable:
        """Returns `function`, with the seconds of each call added to a part."""

        def wrapped(*args, **kwargs):
            before = self.seconds[part]
            result = function(*args, **kwargs)
            self.notes.append(self.seconds[part] - before)
            return result

        return wrapped


def make_state(gigabytes: float) -> TrainState:
    """Returns a state of 16 MiB arrays, a third of them parameters, two thirds moments, on the first device."""
    count = max(3, round(gigabytes * 1e9 / 2**24))
    rng = np.random.default_rng(0)
    leaves = [jnp.asarray(rng.standard_normal((2048, 2048), np.float32)) for _ in range(count)]
    named = {f"w{i}": leaf for i, leaf in enumerate(leaves)}
    params = dict(list(named.items())[::3])
    moments = {name: leaf for name, leaf in named.items() if name not in params}
    zero = jnp.int32(0)
    return TrainState(zero, {"params": params}, moments, {}, zero, zero)


def measure(config: Config, data: shards.DataDir, folder: pathlib.Path, seconds: float, gigabytes: float) -> dict:
    """Runs the loop once; returns all figures in seconds."""
    mesh, clock, device = sharding.make_mesh(config.mesh), Clock(), Device(seconds)
    now, last = make_state(gigabytes), threading.Event()
    last.set()

    def train_step(frozen: dict, state: TrainState, batch: dict) -> tuple[TrainState, dict]:
        nonlocal last
        last = device.send()
        values = {"loss": 1.0, "skipped": 0.0, "skipped_in_a_row": 0.0, **{f"grad_norm/{i}": 1.0 for i in range(24)}}
        return dataclasses.replace(state, step=state.step + 1), {k: Metric(v, last) for k, v in values.items()}

    t = config.train
    order = document_rows.Rows(data, data.mixture, 0, t.seq_len, t.batch_size)
    batches = loader.TrainLoader(order)
    saver = Saver(folder / "checkpoints", config.checkpoint, last=lambda: last)
    writer = metrics.Writer(folder, config.log, {})
    spent = clock_lib.Clock()
    meter = Meter(
        spent, tokens_per_step=t.batch_size * t.seq_len, flops_palm=1, flops_causal=1, peak_flops=None, usd_per_hour=0
    )
    recorder = Recorder(meter, writer, first=1, steps=t.steps, every_steps=config.log.every_steps)
    type(batches).__next__ = clock.timed("loader", type(batches).__next__)
    sharding.to_global = clock.timed("transfer", sharding.to_global)
    writer.write = clock.timed("metrics", writer.write)
    digest.look = clock.timed("digests", digest.look)
    saver.save = clock.noted("digests", saver.save)
    saver.check = clock.timed("checkpoint", saver.check)
    device.start()
    job = loop.Run(
        mesh=mesh,
        steps=t.steps,
        train_step=train_step,
        frozen={},
        batches=LoaderBatches(batches, mesh, base.token_shapes(config, mesh), lambda error: None),
        hooks=[hooks.Save(saver, config.checkpoint, 0.0, {})],
        watches=[watches.SaveInFlight(saver, config.checkpoint), stability.NonFinite(0, config.stability)],
        recorder=recorder,
        clock=spent,
        stop=signals.StopSignal(),
    )
    _, ending = loop.run(job, now)
    device.stop()
    batches.close()
    writer.close()
    assert ending.code == loop.DONE
    del clock.seconds["digests"]
    return {
        "digests": clock.notes[1],
        "gaps": device.gaps(),
        "blocked": saver.blocked[1],
        "host": dict(clock.seconds),
    }


def table(found: dict, config: Config, seconds: float, gigabytes: float, scale_gb: float) -> dict:
    """Returns the figures as milliseconds and shares."""
    steps, at = config.train.steps, config.checkpoint.every_steps
    gaps = found["gaps"]
    first, saving = gaps[at - 1], gaps[2 * at - 1]  # between a saved step and the next
    others = [gap for i, gap in enumerate(gaps) if (i + 1) % at]
    a_step = statistics.fmean(others)
    every = resolve(load("gpuburnout_1b")).checkpoint.every_steps
    scaled = saving * scale_gb / gigabytes
    share = {name: s / (every * seconds + every * a_step + s) for name, s in (("measured", saving), ("scaled", scaled))}
    return {
        "step_s": seconds,
        "idle_ms_a_step": 1e3 * a_step,
        "worst_idle_ms": 1e3 * max(others),
        "host_ms_a_step": {part: 1e3 * s / steps for part, s in found["host"].items()},
        "save_blocks_s": found["blocked"],
        "digests_s": found["digests"],
        "first_save_idle_s": first,
        "save_idle_s": saving,
        "save_gb_per_s": gigabytes / saving,
        "overhead_steps": a_step / (seconds + a_step),
        "overhead_checkpoint": share["measured"],
        "overhead_checkpoint_scaled": share["scaled"],
        "save_idle_scaled_s": scaled,
        "every": every,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens-per-second", type=float, default=90_000)
    parser.add_argument(
        "--steps", type=int, default=15, help="at least 6: two checkpoints, and steps without one between"
    )
    parser.add_argument("--state-gb", type=float, default=0.4, help="of the state that is saved")
    parser.add_argument("--scale-gb", type=float, default=12.5, help="of a 1.04B model with AdamW in float32")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--smallest", action="store_true", help="six short steps, a small state: to see that it works")
    args = parser.parse_args()
    if args.smallest:
        args.steps, args.tokens_per_second, args.state_gb = 6, 5e6, 0.05
    if args.steps < 6:
        parser.error(f"--steps={args.steps} must be at least 6: a third of them lies between two checkpoints")
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        keys = [f"workdir={folder}", "optim.warmup_steps=0", f"train.steps={args.steps}", "train.eval_every_steps=0"]
        keys += [f"checkpoint.every_steps={args.steps // 3}", "checkpoint.keep_every=0"]
        config = resolve(load("gpuburnout_1b", keys))
        seconds = config.train.batch_size * config.train.seq_len / args.tokens_per_second
        data = bench_loader.make_data(folder / "data", 8_000_000, 32005)
        found = measure(config, data, folder, seconds, args.state_gb)
    r = table(found, config, seconds, args.state_gb, args.scale_gb)
    if args.json:
        print(json.dumps(r | {"load": os.getloadavg()}))
        return
    print(f"{args.steps} steps of {seconds:.2f} s; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for part, ms in r["host_ms_a_step"].items():
        print(f"  {part:<11} {ms:8.2f} ms of the host a step, beside the device's work")
    print(
        f"  device idle {r['idle_ms_a_step']:8.2f} ms between steps (worst {r['worst_idle_ms']:.1f}): "
        f"{100 * r['overhead_steps']:.3f}%"
    )
    print(
        f"  checkpoint of {args.state_gb:g} GB: device idle {r['save_idle_s']:.2f} s, {r['save_gb_per_s']:.2f} GB/s; every "
        f"{r['every']} steps: {100 * r['overhead_checkpoint']:.3f}%"
    )
    parts = f"{r['save_blocks_s']:.2f} s, {r['digests_s']:.2f} s of them for digests, which the device computes"
    print(f"    save() blocks {parts}; the first save {r['first_save_idle_s']:.2f} s")
    print(
        f"  at that rate {args.scale_gb:g} GB: {r['save_idle_scaled_s']:.1f} s, {100 * r['overhead_checkpoint_scaled']:.3f}%; "
        f"in all {100 * (r['overhead_steps'] + r['overhead_checkpoint_scaled']):.3f}%"
    )


if __name__ == "__main__":
    main()
