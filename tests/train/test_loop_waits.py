"""The real loop around a real step: what the host waits for, when, and what it moves between host and device.

XLA's guard against copies to the host never fires on a CPU, where host and device share memory. So every way in which
Python waits for an array is watched instead: on a mesh of several devices they all go through three functions of JAX.
"""

import dataclasses
import gzip
import inspect
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny
from jax._src import array
from jax._src.lib import xla_client

from jaxlm import config, config_files, models, sharding
from jaxlm.objectives import lm
from jaxlm.report import profile as report
from jaxlm.train import checkpoint, loop, metrics, optim, state, step

STEPS, LOG_EVERY, B, T = 9, 3, 8, 16


class Watch:
    """Which step was dispatched last, and every wait of the host for what a step made: (made by, dispatched, array)."""

    def __init__(self, monkeypatch):
        self.dispatched, self.waits, self.events, self._made, self._kept = 0, [], [], {}, []
        value = array.ArrayImpl.__dict__["_value"].fget
        block, blocks = array.ArrayImpl.block_until_ready, xla_client.batched_block_until_ready
        monkeypatch.setattr(array.ArrayImpl, "_value", property(lambda x: (self.note(x), value(x))[1]))
        monkeypatch.setattr(array.ArrayImpl, "block_until_ready", lambda x: (self.note(x), block(x))[1])
        monkeypatch.setattr(
            xla_client, "batched_block_until_ready", lambda xs: ([self.note(x) for x in xs], blocks(xs))[1]
        )

    def note(self, x):
        if id(x) in self._made:
            self.waits.append((self._made[id(x)], self.dispatched))
            self.events.append(("wait", self._made[id(x)]))

    def step(self, train_step):
        def watched(now, batch):
            now, on_device = train_step(now, batch)
            self.dispatched += 1
            self.events.append(("dispatch", self.dispatched))
            leaves = jax.tree.leaves((now, on_device))
            self._kept.append(leaves)  # else an id could come again
            self._made |= {id(x): self.dispatched for x in leaves}
            return now, on_device

        return watched


def make_batch():
    batch = jax.tree.map(np.asarray, tiny.packed_batch(tiny.model_config(n_layers=1), batch=B, tokens=T))
    return batch | {"weights": np.ones((B, T), np.float32)}


class Batches:
    """The loader's place: numpy arrays."""

    def __init__(self, watch):
        self._batch, self._watch, self.taken = make_batch(), watch, 0

    def __next__(self):
        self.taken += 1
        self._watch.events.append(("batch", self.taken))
        return self._batch


class Checkpointer(checkpoint.Checkpointer):
    """The real one; saving, which waits by design, may copy."""

    def save(self, *args):
        with jax.transfer_guard("allow"):
            return super().save(*args)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A config, a mesh, a way to make the state, and the compiled step."""
    keys = ["data.path=x", "optim.warmup_steps=0", f"train.steps={STEPS}", f"train.batch_size={B}"]
    keys += [f"train.seq_len={T}", f"log.every_steps={LOG_EVERY}", "train.eval_every_steps=0"]
    c = config.resolve(config_files.load("base", [*keys, f"workdir={tmp_path_factory.mktemp('run')}"]))
    c = dataclasses.replace(c, model=tiny.model_config(n_layers=1))
    mesh = sharding.make_mesh(c.mesh)
    model = models.build(c.model, "xla")
    tx = optim.make(c.optim, models.abstract_params(model))
    where = state.shardings(state.abstract(model, tx), model, mesh)
    pure = step.make(c, lm.make(model, c.model, c.loss), tx, optim.schedule(c.optim, STEPS))
    compiled = step.jit(pure, where, mesh)

    def fresh():
        return jax.device_put(state.init(tiny.random_params(model), tx), where)

    with jax.set_mesh(mesh):
        compiled(fresh(), sharding.to_global(make_batch(), mesh, B))
    return c, mesh, fresh, compiled


def run(trained, tmp_path, monkeypatch, c=None):
    """The loop from step 0 to the end under the guard; what was watched of it."""
    asked, mesh, fresh, compiled = trained
    c, now, watch = c or asked, fresh(), Watch(monkeypatch)
    batches = Batches(watch)
    meter = metrics.Meter(tokens_per_step=B * T, flops_palm=1, flops_causal=1, peak_flops=None, usd_per_hour=0)
    writer = metrics.Writer(tmp_path, dataclasses.replace(c.log, tensorboard=False), {})
    checkpointer = Checkpointer(tmp_path / "checkpoints", c.checkpoint)
    hooks = loop.Hooks(lambda params: {}, lambda params, step: [], {})
    monkeypatch.setattr(
        loop._Loop, "finish", lambda *a, before=loop._Loop.finish: (watch.events.append("end"), before(*a))
    )
    monkeypatch.setattr(
        sharding, "to_global", jax.transfer_guard("allow")(sharding.to_global)
    )  # the one copy to the device
    with jax.transfer_guard("disallow"):
        args = (watch.step(compiled), batches, checkpointer, meter, writer, hooks)
        assert loop.run(c, mesh, now, *args) == loop.DONE
    writer.close()
    return watch


def check(watch):
    """The rules of the steady state."""
    events = watch.events[: watch.events.index("end")]
    dispatched, waits = 0, {}
    for kind, number in events:
        if kind == "dispatch":
            dispatched = number
        elif kind == "batch":
            assert number == dispatched + 1, f"batch {number} was taken with step {dispatched} dispatched"
        else:
            assert number < dispatched or dispatched == STEPS, f"waited for step {number} with {dispatched} dispatched"
            assert ("batch", dispatched + 1) in events[: events.index((kind, number))] or dispatched == STEPS
            waits[number] = waits.get(number, 0) + 1
    assert [n for kind, n in events if kind == "batch"] == list(range(1, STEPS + 1))
    quiet = [step for step in waits if step % LOG_EVERY and step not in (1, STEPS)]
    assert len(quiet) > 3
    assert all(waits[step] == 1 for step in quiet), waits  # is the step good? nothing else is read of it


def test_the_host_waits_for_the_step_before_the_last_alone_and_copies_nothing_unasked(trained, tmp_path, monkeypatch):
    check(run(trained, tmp_path, monkeypatch))
    written = metrics.read(tmp_path / "metrics.jsonl")
    assert sorted(written) == [1, 3, 6, 9]
    assert {"train/loss", "train/grad_norm", "train/lr", "train/skipped"} <= set(written[6])


@pytest.mark.parametrize(
    "mend",
    [
        lambda metrics: float(metrics["loss"]),
        lambda metrics: jax.device_get(metrics),
        lambda metrics: np.asarray(metrics["grad_norm"]),
        lambda metrics: metrics["loss"].block_until_ready(),
        lambda metrics: jax.block_until_ready(metrics),
    ],
)
def test_a_wait_for_the_step_just_sent_is_seen(trained, tmp_path, monkeypatch, mend):
    monkeypatch.setattr(loop._Loop, "fetch", lambda self, step, on_device: mend(on_device))
    watch = run(trained, tmp_path, monkeypatch)
    with pytest.raises(AssertionError, match="waited for step 1 with 1 dispatched"):
        check(watch)


def test_reading_all_metrics_of_every_step_is_seen(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(loop._Loop, "_log_due", lambda self, step: True)
    with pytest.raises(AssertionError):
        check(run(trained, tmp_path, monkeypatch))


def test_a_batch_that_is_taken_only_when_it_is_needed_is_seen(trained, tmp_path, monkeypatch):
    ahead = "            batch = next_batch() if step < total else None"
    source = inspect.getsource(loop.run)
    assert ahead in source
    source = source.replace(ahead, "            pass").replace(
        "train_step(state, batch)", "train_step(state, next_batch())"
    )
    lazy = dict(vars(loop))
    exec(source.replace("batch = next_batch() if step < total else None", "pass"), lazy)
    monkeypatch.setattr(loop, "run", lazy["run"])
    watch = run(trained, tmp_path, monkeypatch)
    with pytest.raises(AssertionError):
        check(watch)


@pytest.mark.parametrize("what", ["a batch left on the host", "an array made in the loop"])
def test_an_implicit_copy_to_the_device_is_refused(trained, tmp_path, monkeypatch, what):
    if "batch" in what:
        monkeypatch.setattr(sharding, "to_global", lambda batch, mesh, size: batch)
    else:
        monkeypatch.setattr(loop._Loop, "fetch", lambda self, step, on_device: jnp.zeros(3))
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        run(trained, tmp_path, monkeypatch)


def test_a_traced_window_is_reported_and_waits_at_its_ends_only(trained, tmp_path, monkeypatch, capsys):
    c = dataclasses.replace(trained[0], workdir=str(tmp_path), profile=config.ProfileConfig("4:6"))
    with jax.transfer_guard("allow"):
        watch = run(trained, tmp_path, monkeypatch, c)
    early = {number for number, dispatched in watch.waits if number >= dispatched} - {STEPS}
    assert early == {3, 6}
    said = capsys.readouterr().err
    assert "steps 4 to 6" in said
    (line,) = (line for line in said.splitlines() if line.startswith("attention "))
    shares = {word: float(share) for word, share in re.findall(r"(\w+) ([\d.]+)%", line)}
    assert set(shares) == set(report.CLASSES)
    assert sum(shares.values()) == pytest.approx(100, abs=0.3)
    assert min(shares["attention"], shares["matmul"], shares["elementwise"], shares["communication"]) > 0
    (folder,) = (tmp_path / "profile/plugins/profile").iterdir()
    events = json.loads(gzip.decompress((folder / "perfetto_trace.json.gz").read_bytes()))["traceEvents"]
    assert any("args" in e and e["args"].get("hlo_module") == "jit_train_step" for e in events)
