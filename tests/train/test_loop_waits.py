"""The real loop around a real step: what the host waits for, when, and what it moves between host and device.

XLA's guard against copies to the host never fires on a CPU, where host and device share memory. So the step gives the loop
stand-ins for its arrays, which note every way in which Python waits for one.
"""

import contextlib
import dataclasses
import gzip
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny

from jaxlm import config
from jaxlm.config import config_files
from jaxlm.devices import sharding
from jaxlm.run import clock, metrics, signals
from jaxlm.run.checkpoints.store import Checkpointer
from jaxlm.step import parts, state
from jaxlm.step.objectives import lm
from jaxlm.train import hooks, loop, profile, recorder, stability, watches
from jaxlm.train.recorder import Meter

STEPS, LOG_EVERY, B, T = 9, 3, 8, 16


class Watch:
    """Which step was dispatched last, and every wait of the host for what a step made: (made by, dispatched)."""

    def __init__(self):
        self.dispatched, self.waits, self.events = 0, [], []

    def note(self, made):
        self.waits.append((made, self.dispatched))
        self.events.append(("wait", made))

    def step(self, train_step):
        """The step whose results are stand-ins."""

        def watched(frozen, now, batch):
            now, found = train_step(frozen, real(now), batch() if callable(batch) else batch)
            self.dispatched += 1
            self.events.append(("dispatch", self.dispatched))
            return jax.tree.map(lambda x: StandIn(x, self.dispatched, self), (now, found))

        return watched


class StandIn:
    """An array that tells when somebody waits for it."""

    def __init__(self, array, made, watch):
        self.array, self._made, self._watch = array, made, watch

    def copy_to_host_async(self):
        self.array.copy_to_host_async()  # nobody waits

    def __float__(self):
        self._watch.note(self._made)
        return float(self.array)

    def __array__(self, dtype=None, copy=None):
        self._watch.note(self._made)
        return np.asarray(self.array, dtype)

    def block_until_ready(self):
        self._watch.note(self._made)
        self.array.block_until_ready()
        return self


def real(now):
    return jax.tree.map(lambda x: x.array if isinstance(x, StandIn) else x, now)


def make_batch():
    batch = jax.tree.map(np.asarray, tiny.packed_batch(tiny.model_config(n_layers=1), batch=B, tokens=T))
    return batch | {"weights": np.ones((B, T), np.float32)}


class Batches:
    """The loader's place. `lazy` takes a batch only when the step needs it."""

    activity = "data"

    def __init__(self, watch, mesh, lazy=False, from_state=False):
        self._watch, self._mesh, self._lazy, self.taken = watch, mesh, lazy, 0
        self.from_state = from_state

    def __call__(self, now):
        return self._take if self._lazy else self._take()

    def _take(self):
        self.taken += 1
        self._watch.events.append(("batch", self.taken))
        with jax.transfer_guard("allow"):  # the one copy to the device
            return sharding.to_global(make_batch(), self._mesh, B)


class Saver(Checkpointer):
    """The real one; saving, which waits by design, may copy."""

    def save(self, now, meta):
        with jax.transfer_guard("allow"):
            return super().save(real(now), meta)


class End(hooks.Hook):
    """Notes that the last step is over: hooks may wait for the device."""

    name = "end"

    def __init__(self, watch):
        self._watch = watch

    def due(self, step, end):
        return step == end

    def __call__(self, moment):
        self._watch.events.append("end")


class Recorder(recorder.Recorder):
    """With a mutation in the place where copies to the host are begun."""

    def __init__(self, *args, mutation=None, **kwargs):
        super().__init__(*args, **kwargs)
        self._mutation = mutation

    def fetch(self, step, found):
        if self._mutation:
            self._mutation(found)
        else:
            super().fetch(step, found)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A config, a mesh, a way to make the state, and the compiled step."""
    jax.clear_caches()  # a trace holds all programs of this process
    keys = ["data.path=x", "optim.warmup_steps=0", f"train.steps={STEPS}", f"train.batch_size={B}"]
    keys += [f"train.seq_len={T}", f"log.every_steps={LOG_EVERY}", "train.eval_every_steps=0"]
    c = config.resolve(config_files.load("base", [*keys, f"workdir={tmp_path_factory.mktemp('run')}"]))
    c = dataclasses.replace(c, model=tiny.model_config(n_layers=1, attention="xla"))
    made = parts.make(c, sharding.make_mesh(c.mesh), lm.make)
    compiled = made.jit()

    def fresh():
        return jax.device_put(state.init({"params": tiny.random_params(made.model)}, made.tx), made.shardings)

    with jax.set_mesh(made.mesh):
        compiled({}, fresh(), sharding.to_global(make_batch(), made.mesh, B))
    return c, made.mesh, fresh, compiled


def run(trained, folder, *, window=None, log_every=LOG_EVERY, mutation=None, **batches):
    """The loop from step 0 to the end under the guard; what was watched of it."""
    c, mesh, fresh, compiled = trained
    watch, now = Watch(), fresh()
    spent = clock.Clock()
    meter = Meter(spent, tokens_per_step=B * T, flops_palm=1, flops_causal=1, peak_flops=None, usd_per_hour=0)
    writer = metrics.Writer(folder, dataclasses.replace(c.log, tensorboard=False), {})
    saver = Saver(folder / "checkpoints", c.checkpoint)
    trace = profile.Trace(window, folder / "profile")
    job = loop.Run(
        mesh=mesh,
        steps=STEPS,
        train_step=watch.step(compiled),
        frozen={},
        batches=Batches(watch, mesh, **batches),
        hooks=[trace, End(watch), hooks.Save(saver, c.checkpoint, 0.0, {}), trace.begin],
        watches=[watches.SaveInFlight(saver, c.checkpoint), stability.NonFinite(20, c.stability)],
        recorder=Recorder(meter, writer, first=1, steps=STEPS, every_steps=log_every, mutation=mutation),
        clock=spent,
        stop=signals.StopSignal(),
    )
    with (
        contextlib.closing(writer),
        contextlib.closing(job.recorder),
        jax.transfer_guard("allow" if window else "disallow"),
        trace,
    ):
        _, ending = loop.run(job, now)
    assert ending.code == loop.DONE, ending.why
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
    assert all(waits[step] == 2 for step in quiet), waits  # is the step good, and its loss; nothing else is read of it


def test_the_host_waits_for_the_step_before_the_last_alone_and_copies_nothing_unasked(trained, tmp_path):
    check(run(trained, tmp_path))
    written = metrics.read(tmp_path / "metrics.jsonl")
    assert sorted(written) == [1, 3, 6, 9]
    assert {"train/loss", "train/grad_norm", "train/lr", "train/skipped"} <= set(written[6])


@pytest.mark.parametrize(
    "mutation",
    [
        lambda found: float(found["loss"]),
        lambda found: np.asarray(found["grad_norm"]),
        lambda found: jax.block_until_ready(found),
    ],
)
def test_a_wait_for_the_step_just_sent_is_seen(trained, tmp_path, mutation):
    watch = run(trained, tmp_path, mutation=mutation)
    with pytest.raises(AssertionError, match="waited for step 1 with 1 dispatched"):
        check(watch)


def test_before_a_batch_that_is_made_of_the_state_its_step_is_over(trained, tmp_path):
    """So the step's seconds are the step's, not those of the batch that waits for it."""
    events = run(trained, tmp_path, from_state=True).events
    for step in range(1, STEPS):
        between = events[events.index(("dispatch", step)) + 1 : events.index(("batch", step + 1))]
        assert {*between} == {("wait", step)}


@pytest.mark.parametrize("mutated", [{"log_every": 1}, {"lazy": True}], ids=["all metrics", "a late batch"])
def test_reading_all_metrics_or_taking_a_batch_only_when_it_is_needed_is_seen(trained, tmp_path, mutated):
    watch = run(trained, tmp_path, **mutated)
    with pytest.raises(AssertionError):
        check(watch)


def test_an_implicit_copy_to_the_device_is_refused(trained, tmp_path):
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError), match="Disallowed host-to-device"):
        run(trained, tmp_path, mutation=lambda found: jnp.zeros(3))


def test_a_traced_window_is_reported_and_waits_at_its_ends_only(trained, tmp_path, capsys):
    watch = run(trained, tmp_path, window=(4, 6))
    early = {number for number, dispatched in watch.waits if number >= dispatched} - {STEPS}
    assert early == {3, 6}
    said = capsys.readouterr().err
    assert "steps 4 to 6" in said
    (line,) = (line for line in said.splitlines() if line.startswith("attention "))
    shares = {word: float(share) for word, share in re.findall(r"(\w+) ([\d.]+)%", line)}
    assert set(shares) == set(profile.CLASSES)
    assert sum(shares.values()) == pytest.approx(100, abs=0.3)
    assert min(shares["attention"], shares["matmul"], shares["elementwise"], shares["communication"]) > 0
    (folder,) = (tmp_path / "profile/plugins/profile").iterdir()
    events = json.loads(gzip.decompress((folder / "perfetto_trace.json.gz").read_bytes()))["traceEvents"]
    assert any("args" in e and e["args"].get("hlo_module") == "jit_train_step" for e in events)
