"""What other kinds of training stand on, on the real loop with a real step and real checkpoints."""

import dataclasses
import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny
from tiny_steps import B, T, make_batch, make_config, make_mesh

from jaxlm.config import ConfigError
from jaxlm.devices import sharding
from jaxlm.run import clock, signals
from jaxlm.run.checkpoints.store import Checkpointer
from jaxlm.step import parts
from jaxlm.step.objectives import lm
from jaxlm.train import hooks, loop, stability, watches
from jaxlm.train.recorder import Meter, Recorder

STEPS = 5


def iterated(model, c):
    """Four updates a step on weights that adapt, as PPO's KL penalty does: `running` goes into the next batch."""
    plain = lm.make(model, c)

    def adapt(running, found):
        return {"penalty": jnp.where(found["loss"] > 4.6, running["penalty"] * 1.5, running["penalty"] / 1.5)}

    return dataclasses.replace(plain, minibatches=4, running={"penalty": 1.0}, adapt=adapt)


def spiky(model, c):
    """A batch whose weights are above 1 has a loss that is as many times as high."""
    plain = lm.make(model, c)

    def sums(variables, batch, key):
        found = plain.sums(variables, batch, key)
        return found._replace(loss=found.loss * jnp.max(batch["weights"]))

    return dataclasses.replace(plain, sums=sums)


@jax.jit
def rollout(state, batch):
    """A batch that the state writes: tokens follow from its parameters, weights from what it adapts."""
    norm = jnp.sum(jnp.abs(state.params["params"]["embed"]["embedding"])) * 1e4
    tokens = (batch["tokens"] + norm.astype(jnp.int32) + state.step) % 101
    weights = batch["weights"] * state.running.get("penalty", jnp.float32(1))
    return batch | {"tokens": tokens, "targets": jnp.roll(tokens, -1, axis=1), "weights": weights}


class Rollouts:
    def __init__(self, mesh, first):
        self._mesh = mesh

    activity, from_state = "rollout", True

    def __call__(self, state):
        return sharding.to_global(jax.device_get(rollout(state, make_batch())), self._mesh, B)

    def close(self):
        pass


class Fixed:
    """The batch of step s is that of number s; steps whose numbers are in `passed_over` are left out."""

    def __init__(self, mesh, first, passed_over=(), spoiled=()):
        self._mesh, self._spoiled = mesh, spoiled
        self._numbers = iter([n for n in range(1, 100) if n not in passed_over][first:])

    activity, from_state = "data", False

    def __call__(self, state):
        number = next(self._numbers)
        batch = jax.tree.map(np.asarray, make_batch(number))
        if number in self._spoiled:
            batch["weights"] = batch["weights"] * 3
        return sharding.to_global(batch, self._mesh, B)

    def close(self):
        pass


class Spike(loop.Watch):
    """Rolls back at a loss that is far above the one before."""

    reads = ("loss",)

    def __init__(self):
        self._before = None

    def __call__(self, step, record):
        before, self._before = self._before, record["loss"]
        if before and record["loss"] > 1.2 * before:
            return loop.Ending(loop.ROLL_BACK, f"the loss of step {step} is {record['loss']:.2f}", keep=False)
        return None


class Gate(hooks.Hook):
    """Ends the run after a step."""

    name = "gate"

    def __init__(self, step):
        self._step = step

    def due(self, step, end):
        return step == self._step

    def __call__(self, moment):
        return loop.Ending(loop.STOPPED, "the gate is shut")


@functools.cache
def program(objective, microbatch=B, **optim):
    """(a one-layer model's parts on two devices, its train step, its first state on the host)."""
    c = make_config(batch_size=B, microbatch_size=microbatch)
    model = tiny.model_config(n_layers=1, attention="xla")
    c = dataclasses.replace(c, model=model, optim=dataclasses.replace(c.optim, **optim))
    made = parts.make(c, make_mesh(data=2), objective)
    state, _ = made.create()
    return made, made.jit(), jax.device_get(state)


def stepped(made, step, state, batch):
    """The state after one step, and its metrics."""
    with jax.set_mesh(made.mesh):
        return step({}, jax.device_put(state, made.shardings), sharding.to_global(jax.device_get(batch), made.mesh, B))


def train(folder, objective=lm.make, *, batches=Rollouts, steps=STEPS, every=3, more_hooks=(), more_watches=()):
    """(last state, how it ended) of a run in a folder, from its newest checkpoint if it has any."""
    made, train_step, state = program(objective, 2 if objective is iterated else B)
    c = made.config
    checkpointer = Checkpointer(folder, dataclasses.replace(c.checkpoint, keep_last=9))
    if checkpointer.steps():
        state, _ = checkpointer.restore_latest(made.abstract, made.shardings)
    else:
        state = jax.device_put(state, made.shardings)
    first = int(state.step)
    spent = clock.Clock()
    meter = Meter(spent, tokens_per_step=B * T, flops_palm=1, flops_causal=1, peak_flops=None, usd_per_hour=0)
    watching = [watches.SaveInFlight(checkpointer, c.checkpoint), stability.NonFinite(3, c.stability), *more_watches]
    reads = [name for watch in watching for name in watch.reads]
    job = loop.Run(
        mesh=made.mesh,
        steps=steps,
        train_step=train_step,
        frozen={},
        batches=batches(made.mesh, first),
        hooks=[hooks.Save(checkpointer, dataclasses.replace(c.checkpoint, every_steps=every), 0.0, {}), *more_hooks],
        watches=watching,
        recorder=Recorder(meter, None, first=first + 1, steps=steps, every_steps=100, reads=reads),
        clock=spent,
        stop=signals.StopSignal(),
    )
    return loop.run(job, state)


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


def test_a_producer_that_reads_the_state_resumes_to_the_bit_with_four_updates_a_step(tmp_path, monkeypatch):
    whole, ending = train(tmp_path / "whole", iterated)
    assert ending.code == loop.DONE
    adam = whole.opt_state[0]
    assert (int(whole.step), int(adam.count), int(whole.skipped)) == (STEPS, 4 * STEPS, 0)
    assert float(whole.running["penalty"]) not in (0.0, 1.0)
    stopped, ending = train(tmp_path / "parts", iterated, more_hooks=[Gate(4)])
    assert (ending, int(stopped.step)) == (loop.Ending(loop.STOPPED, "the gate is shut"), 4)
    assert Checkpointer(tmp_path / "parts", read_only=True).steps() == [3, 4]  # saved at 3, and at its end
    shutil.copytree(tmp_path / "parts", tmp_path / "forgets")
    resumed, _ = train(tmp_path / "parts", iterated)
    assert_same(resumed, whole)
    restore = Checkpointer.restore

    def forgetful(*args):  # the mutation: `running` begins anew
        return dataclasses.replace(restore(*args), running={"penalty": jnp.float32(1)})

    monkeypatch.setattr(Checkpointer, "restore", forgetful)
    resumed, _ = train(tmp_path / "forgets", iterated)
    with pytest.raises(AssertionError):
        assert_same(resumed, whole)


def test_each_update_takes_its_own_rows_and_the_metrics_are_means():
    """Four updates on four rows each by hand, one after the other, against one step."""
    at_once, step, state = program(iterated, 2)
    one = dataclasses.replace(at_once.config.train, batch_size=2, microbatch_size=2)
    apart = parts.make(dataclasses.replace(at_once.config, train=one), make_mesh(), lm.make)
    batch, by_hand = make_batch(1), jax.jit(apart.step())
    got, found = stepped(at_once, step, state, batch)
    want, losses = dataclasses.replace(state, running={}), []
    for update in range(4):
        want = dataclasses.replace(want, step=jnp.int32(0))
        want, metrics_of = by_hand({}, want, jax.tree.map(lambda x, u=update: x[u::4], batch))
        losses.append(float(metrics_of["loss"]))
    assert tiny.difference(got.params, want.params) < 1e-4
    assert float(found["loss"]) == pytest.approx(np.mean(losses), rel=1e-5)
    assert int(got.step) == 1


def test_what_adapts_does_not_learn_from_a_step_that_was_not_finite():
    made, step, state = program(iterated, 2)
    batch = make_batch(1)
    bad = batch | {"weights": batch["weights"].at[1, 0].set(jnp.nan)}  # in one of four updates
    after, found = stepped(made, step, state, bad)
    assert (int(after.skipped), float(found["skipped"])) == (1, 1.0)
    assert float(after.running["penalty"]) == 1.0
    good, _ = stepped(made, step, state, batch)
    assert float(good.running["penalty"]) != 1.0


@pytest.mark.parametrize(
    ("microbatch", "updates", "message"), [(8, 3, "in 3 minibatches"), (3, 2, "microbatch_size=3")]
)
def test_rows_that_updates_and_microbatches_do_not_divide_are_refused(microbatch, updates, message):
    c = make_config(batch_size=B, microbatch_size=microbatch)
    made = parts.make(c, make_mesh(), lambda *a: dataclasses.replace(lm.make(*a), minibatches=updates))
    with pytest.raises(ConfigError, match=message):
        made.step()


def two_updates(*args):
    return dataclasses.replace(lm.make(*args), minibatches=2)


def test_updates_of_whole_rows_and_with_the_optimizer_offloaded():
    """A microbatch that is larger than an update's rows is those rows."""
    here, away = (stepped(*program(two_updates, offload=offload), make_batch(1))[0] for offload in (False, True))
    assert_same(here, away)


def test_a_watch_rolls_a_real_run_back_past_the_window_that_spoiled_it(tmp_path):
    """Equal to the bit to a run whose data never had the window."""

    def spoiled(mesh, first):
        return Fixed(mesh, first, spoiled=(4,))

    def past(mesh, first):
        return Fixed(mesh, first, passed_over=(3, 4), spoiled=(4,))

    _, ending = train(tmp_path / "run", spiky, batches=spoiled, steps=6, every=2, more_watches=[Spike()])
    assert ending.code == loop.ROLL_BACK
    assert ending.why.startswith("the loss of step 4 is")
    assert Checkpointer(tmp_path / "run", read_only=True).steps()[-1] <= 4
    for step in Checkpointer(tmp_path / "run", read_only=True).steps():
        if step > 2:  # saved before the spike was read: rolling back leaves it out
            (tmp_path / "run" / str(step)).rename(tmp_path / f"spoiled{step}")
    again, ending = train(tmp_path / "run", spiky, batches=past, steps=6, every=2, more_watches=[Spike()])
    assert ending.code == loop.DONE
    clean, _ = train(
        tmp_path / "clean", spiky, batches=lambda mesh, first: Fixed(mesh, first, (3, 4)), steps=6, every=2
    )
    assert_same(again, clean)
    spoiled_for_good, _ = train(tmp_path / "spoiled", spiky, batches=spoiled, steps=6, every=2)
    with pytest.raises(AssertionError):
        assert_same(spoiled_for_good, clean)
