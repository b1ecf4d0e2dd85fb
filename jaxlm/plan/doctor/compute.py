"""Checks that the devices compute: the same forward pass twice, bit for bit, and as fast as such devices did before.

Legend: B rows, T tokens.
"""

import dataclasses
import datetime
import time

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxlm import models
from jaxlm.config import Config
from jaxlm.devices import sharding
from jaxlm.host.console import count, human
from jaxlm.plan import flops, lower
from jaxlm.plan.doctor.findings import FAIL, OK, WARN, Finding
from jaxlm.plan.params import count_params
from jaxlm.plan.tune import bench, machines
from jaxlm.step import parts
from jaxlm.step.objectives import base, lm

CPU_PARAMS = 60_000_000  # of a model that a CPU runs whole in the time of a check
LAYERS, CPU_VOCAB, CPU_TOKENS = 2, 4096, 256  # of a larger one, shrunk
SLOW = 0.85  # of the speed before, below which it is said
_STEPS, _STEP_SECONDS = 5, 6.0  # timed at most, but two steps at least


def shrunk(config: Config, mesh: Mesh, free_bytes: int) -> tuple[Config, str]:
    """Returns (the config of a forward pass that takes seconds, what it is in words).

    The batch is one row for each part of the mesh. The model is whole if it is small, or if it fits an accelerator;
    else it has fewer layers, and on a CPU a smaller vocabulary and shorter rows. Its width, so its kernels, stay.

    Args:
      free_bytes: the memory of one device that may be used.
    """
    m, t, cpu = config.model, config.train, mesh.devices.flat[0].platform == "cpu"
    params = count_params(m)
    whole = params <= CPU_PARAMS if cpu else params * 6 < free_bytes
    model = m if whole else dataclasses.replace(m, n_layers=min(m.n_layers, LAYERS))
    tokens = t.seq_len
    if cpu and not whole:
        tokens, ways = min(t.seq_len, CPU_TOKENS), mesh.shape["context"]
        tokens = t.seq_len if tokens % ways else tokens
        model = dataclasses.replace(model, vocab_size=min(m.vocab_size, CPU_VOCAB), remat="none")
    B = sharding.batch_ways(mesh)
    train = dataclasses.replace(t, batch_size=B, microbatch_size=B, seq_len=tokens)
    what = "the whole model" if whole else f"{model.n_layers} of its {m.n_layers} layers"
    what += "" if model.vocab_size == m.vocab_size else f", vocabulary {count(model.vocab_size)}"
    return dataclasses.replace(config, model=model, train=train), f"{what}, {B} x {count(tokens)} tokens"


def twice(config: Config, mesh: Mesh, free_bytes: int) -> Finding:
    """Returns a finding on the same forward pass, made three times: its hidden states must agree to the last bit.

    Forward passes add in a fixed order, so a difference is an error of the hardware (or of a kernel). The parameters are
    new ones, from `config.seed`.

    Args:
      config: the config, with `model.attention` and `model.dtype` set (not auto).
      free_bytes: the memory of one device that may be used.
    """
    small, what = shrunk(config, mesh, free_bytes)
    made = parts.make(small, mesh, lm.make)
    batch = bench.random_batch(made)
    began = time.monotonic()
    with jax.set_mesh(mesh):
        key, shardings = jax.random.key(config.seed), made.shardings.params["params"]
        variables = {"params": models.create_params(made.model, key, shardings)}
        forward = jax.jit(lambda variables, batch: base.hidden(made.model, variables, batch, None))
        first, compare = forward(variables, batch), jax.jit(differences)
        counts = [compare(first, forward(variables, batch)) for _ in range(2)]
    differing, nonfinite = max(int(n) for n, _ in counts), int(counts[0][1])
    seconds = time.monotonic() - began
    figures = {"what": what, "differing": differing, "nonfinite": nonfinite, "seconds": seconds}
    if not (differing or nonfinite):
        return Finding("forward", OK, f"{what}: equal to the last bit, three times", figures)
    wrong = f"{count(differing)} of {count(first.size)} numbers differ"
    wrong = wrong if differing else f"{count(nonfinite)} numbers are not finite"
    text = f"{what}: {wrong} between equal forward passes: this device computes wrong; take another machine"
    return Finding("forward", FAIL, text, figures)


def differences(one: jax.Array, two: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (how many elements of two arrays differ in a bit, how many of the first are not finite)."""
    integer = jnp.dtype(f"uint{8 * one.dtype.itemsize}")
    bits = [jax.lax.bitcast_convert_type(x, integer) for x in (one, two)]
    return (bits[0] != bits[1]).sum(), (~jnp.isfinite(one)).sum()


def speed(config: Config, mesh: Mesh, product_flops: float) -> Finding:
    """Returns a finding on the tokens per second of the real step, against what such devices did before.

    It compiles the run's own step, so the run's start finds it in the compile cache. What was measured is remembered.

    Args:
      config: the config as it runs: nothing is auto any more.
      product_flops: what `bench.product` measured.
    """
    kind, setting = jax.devices()[0].device_kind, machines.key(config, mesh.shape)
    before = machines.known(kind, mesh.size, setting)
    began = time.monotonic()
    made = lower.parts_of(config, mesh)
    state, frozen = made.create()
    batch, step = bench.random_batch(made), made.jit()

    def timed() -> float:
        nonlocal state
        began = time.perf_counter()
        state, metrics = step(frozen, state, batch)
        jax.block_until_ready(metrics)
        return time.perf_counter() - began

    with jax.set_mesh(mesh):
        timed()
        ready = time.monotonic() - began
        (step_s,) = bench.medians([timed], _STEPS, _STEP_SECONDS)
    now = config.train.batch_size * config.train.seq_len / step_s
    if jax.process_index() == 0:
        machines.record(kind, mesh.size, setting, now, "doctor")
    figures = {"tokens_per_second": now, "step_s": step_s, "start_s": ready}
    figures |= {"product_flops": product_flops, "before": before and before.tokens_per_second}
    return compared(figures, before, config.hardware.peak_tflops or flops.peak_tflops(kind))


def compared(figures: dict, before: machines.Known | None, peak_tflops: float | None) -> Finding:
    """Returns a finding on `tokens_per_second` of `figures` against what is known, if anything is.

    Args:
      figures: also has `product_flops`, the FLOP/s of a matrix product.
      before: what such devices did with this setting.
      peak_tflops: the peak of one device by its data sheet, if known.
    """
    now, of = figures["tokens_per_second"], f" of {peak_tflops:.0f}" if peak_tflops else ""
    text = f"{human(now)} tokens/s; a matrix product makes {figures['product_flops'] / 1e12:.3g}{of} TFLOP/s"
    if not before:
        return Finding("speed", OK, f"{text}; nothing is known of such a run on this device yet", figures)
    day = datetime.datetime.fromtimestamp(before.time).date()
    text += f"; before: {human(before.tokens_per_second)} ({before.measurements} times, last by {before.by} on {day})"
    if now < SLOW * before.tokens_per_second:
        return Finding("speed", WARN, f"{text}: slower; something else runs here, or the card is throttled", figures)
    return Finding("speed", OK, text, figures)
