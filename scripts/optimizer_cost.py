"""Estimates how much longer a step with Muon takes than with AdamW, from shapes alone: needs no GPU and no memory.

    python scripts/optimizer_cost.py gpuburnout_1b --tokens=262144 --accelerator=H100

Each update is lowered, not compiled. Counts the operations of its matrix products and the bytes that these read and write, and
the bytes of gradients, state and parameters, each read once, and written once if it changes. The forward and backward pass
take `plan`'s operations, 6N + 12LdT per token. Seconds are operations / (the accelerator's peak x the MFU of training) plus
bytes / bandwidth. An update of `checkpoint.average` moves 12 bytes a parameter. With --accelerator=cpu it and a step are timed
here, by the CPU's seconds, which other programs change little.
"""

import argparse
import dataclasses
import math
import re
import time
import typing

import jax

from jaxlm import models
from jaxlm.config import Config, MeshConfig, config_files, resolve, with_keys
from jaxlm.devices import sharding
from jaxlm.models import hardware
from jaxlm.plan import accelerators, flops, lower
from jaxlm.plan.cost import mfu
from jaxlm.plan.tune import tune
from jaxlm.step import optim
from jaxlm.train import average

WIDTHS = {"f32": 4, "bf16": 2}
_DOT = re.compile(r"dot_general (.*?) : \((.*)\) -> (tensor<\S+>)")
_DIMS = re.compile(r"contracting_dims = \[(\d+)\]")


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of an update: operations of matrix products, the bytes that these move, and all other bytes."""

    flops: int
    products: int
    rest: int


def tensor(text: str) -> tuple[tuple[int, ...], int]:
    """Returns (shape, bytes) of a type such as `tensor<3x4xf32>`."""
    *dims, kind = re.search(r"<([^>]+)>", text)[1].split("x")
    shape = tuple(map(int, dims))
    return shape, math.prod(shape) * WIDTHS[kind]


def products(text: str) -> tuple[int, int]:
    """Returns (operations, bytes read and written) of all matrix products in a lowered program."""
    operations = moved = 0
    for attributes, operands, result in _DOT.findall(text):
        (left, a), (_, b), (out, c) = (tensor(t) for t in (*operands.split(", "), result))
        operations += 2 * math.prod(out) * left[int(_DIMS.search(attributes)[1])]
        moved += a + b + c
    return operations, moved


def cost(config: Config, name: str) -> Cost:
    """Returns the cost of an update of all of a config's parameters by the optimizer `name`."""
    params = models.abstract_params(models.build(config.model, "xla"))
    tx = optim.make(dataclasses.replace(config.optim, name=name), params, dtype=config.model.dtype)
    state = jax.eval_shape(tx.init, params)
    text = jax.jit(lambda g, s, p: tx.update(g, s, p, ok=True, rate=1e-3)).lower(params, state, params).as_text()
    read, kept = (sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)) for tree in (params, state))
    return Cost(*products(text), 3 * read + 2 * kept)


def timed(config: Config) -> tuple[float, float]:
    """Returns the CPU's seconds (of a step, of an update of the moving average) on one device."""
    mesh = sharding.make_mesh(MeshConfig(1, 1, 1, 1), jax.devices()[:1])
    config = with_keys(config, checkpoint={"average": 0.1}, train={"microbatch_size": config.train.batch_size})
    made = lower.parts_of(config, mesh)
    every = average.every(config, "cpu")
    with jax.set_mesh(mesh):
        (state, frozen), batch, step = made.create(), tune.random_batch(made), made.jit()
        kept = average.following(lambda frozen, state, batch: (state, {}), config, mesh, made.shardings, 0)

        def each(call: typing.Callable, times: int) -> float:
            nonlocal state
            began = time.process_time()
            for _ in range(times):
                state = jax.block_until_ready(call(frozen, state, batch)[0])
            return (time.process_time() - began) / times

        each(step, 1)  # compiles
        step_s = each(step, 8)
        each(kept, every)
        return step_s, each(kept, 30 * every) * every


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--tokens", type=int, default=0, help="of a step (default: the config's)")
    parser.add_argument("--accelerator", default="H100", help="as in configs/prices.toml; cpu: operations alone")
    args = parser.parse_args()
    c = resolve(config_files.load(args.config, ["data.path=x"]))
    of_cpu = args.accelerator == "cpu"
    c = dataclasses.replace(c, model=hardware.for_platform(c.model, "cpu" if of_cpu else "gpu"))
    tokens = args.tokens or c.train.batch_size * c.train.seq_len
    model = tokens * flops.of(c).palm
    costs = {name: cost(c, name) for name in ("adamw", "muon")}
    print(f"{args.config}: {tokens:,} tokens a step, {model / 1e12:.4g} TFLOP in the model's passes, {c.model.dtype}")
    for name, found in costs.items():
        print(
            f"  {name:6} {found.flops / 1e12:9.4g} TFLOP in products ({found.flops / model:.2%} of the model's), which move "
            f"{found.products / 1e9:.3g} GB; gradients, state, parameters {found.rest / 1e9:.3g} GB"
        )
    ratio = (model + costs["muon"].flops) / (model + costs["adamw"].flops)
    print(f"  muon's step over adamw's, by operations: {ratio:.4f}")
    every = average.every(c, "cpu" if of_cpu else "gpu")
    if of_cpu:
        step, update = timed(c)
        timing = f"{step:.3f} s of the CPU a step, {update:.5f} an update"
    else:
        card = accelerators.load().named(args.accelerator)
        rate, bandwidth = card.tflops * 1e12 * mfu(c.model, card), card.bandwidth_gb * 1e9
        seconds = {name: (model + x.flops) / rate + (x.products + x.rest) / bandwidth for name, x in costs.items()}
        print(
            f"  by seconds on one {card.name} ({mfu(c.model, card):.0%} of its peak, {card.bandwidth_gb:g} GB/s): "
            f"{seconds['muon']:.3f} / {seconds['adamw']:.3f} = {seconds['muon'] / seconds['adamw']:.4f}"
        )
        step, update = model / rate, 12 * flops.count_params(c.model) / bandwidth
        timing = f"{step:.3f} s a step, {update:.5f} an update"
    print(f"  a moving average of the weights, every {every} steps: {update / every / step:.3%} of a step ({timing})")


if __name__ == "__main__":
    main()
