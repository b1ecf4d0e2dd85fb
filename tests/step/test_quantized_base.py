"""What is trained beside kernels in codes: as beside the decoded model, on any mesh, with one layer decoded at a time."""

import dataclasses
import functools
import math
import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny
from tiny_steps import assert_close, changed, make_config, make_mesh, run_steps

from jaxlm.models import adapters
from jaxlm.step import parts
from jaxlm.step.objectives import lm


def lora(settings):
    """A LoRA of rank 2 on all kernels, and two rows."""
    return adapters.of(dataclasses.replace(settings, kind="lora", rank=2), (3, 7))


def decoded_first(model, c):
    """The mistake that the checks below must see: all layers are decoded before the first runs."""
    objective = lm.make(model, c)

    def sums(variables, batch, key):
        thawed = {"params": tiny.thaw(variables, model), "lora": variables["lora"], "rows": variables["rows"]}
        return objective.sums(thawed, batch, key)

    return dataclasses.replace(objective, sums=sums)


def config_of(kind: str, **changes):
    return changed(make_config(), adapter__quantize=kind, model__attention="xla", **changes)


def made_of(c, **mesh):
    return parts.make(c, make_mesh(**mesh), lm.make, lora(c.adapter))


@functools.cache
def plain(kind: str):
    """Two steps beside a base of this kind on one device: what all other ways must equal."""
    return run_steps(made_of(config_of(kind)))


class Thawed:
    """The decoded model as an origin."""

    def __init__(self, model, frozen):
        self.params = tiny.thaw(frozen, model)

    def leaf(self, name):
        return np.asarray(functools.reduce(operator.getitem, name.split("/"), self.params))

    def trained(self):
        return {}


@pytest.fixture(scope="module")
def beside():
    """`beside(frozen)`: two steps beside a base that is not in codes, new or decoded, by one program."""
    made = made_of(config_of("none"))
    program = made.jit()
    return lambda frozen=None: run_steps(made, origin=frozen and Thawed(made.model, frozen), program=program)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_training_beside_codes_is_training_beside_the_decoded_model(kind, beside):
    want, history, frozen = plain(kind)
    assert set(frozen) == {"params", "quantized"}
    got, dense_history, base = beside(frozen)
    assert set(base) == {"params"}
    assert_close(got.params, want.params, rtol=1e-5)
    assert_close(dense_history, history, rtol=1e-5)
    assert float(jnp.max(jnp.abs(want.params["lora"]["layers_0"]["attn"]["q"]["lora_b"]))) > 1e-4
    coded, decoded, other = (float(h[1]["loss"]) for h in (history, dense_history, beside()[1]))
    assert abs(coded - decoded) < abs(coded - other) / 2  # and the codes are what was multiplied


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        ({"data": 2, "fsdp": 4}, {"loss__tile_tokens": 16, "model__scan_layers": True, "model__remat": "full"}),
        (
            {"fsdp": 2, "tensor": 2, "context": 2},
            {"train__microbatch_size": 2, "model__remat": "names", "model__fuse_projections": False},
        ),
    ],
)
def test_on_many_devices_scanned_and_accumulated_it_is_the_same(mesh, changes):
    want, history, frozen = plain("nf4")
    got, got_history, placed = run_steps(made_of(config_of("nf4", **changes), **mesh))
    jax.tree.map(np.testing.assert_array_equal, placed, frozen)
    assert_close(got.params, want.params, rtol=1e-4)
    assert_close(got_history, history, rtol=1e-4)


def most_decoded(text: str, least: int) -> int:
    """The most bytes of decoded kernels that are in memory together in a compiled program, whose text is in its order.

    Decoded is what a fusion or loop makes of uint8 as floats of at least `least` elements, until its last use.
    """
    most = 0
    for computation in re.split(r"\n\n", text):
        kinds, born, last = {}, {}, {}
        for i, line in enumerate(computation.splitlines()):
            if not (found := re.match(r"\s*(?:ROOT )?%([\w.-]+) = (\w+)\[([\d,]*)\]\S* ([\w-]+)\((.*?)\)", line)):
                continue
            name, dtype, shape, opcode, operands = found.groups()
            kinds[name], names = dtype, re.findall(r"%([\w.-]+)", operands)
            for operand in names:
                for source in (operand, *(last.get(("view", operand), ()))):
                    if source in born:
                        last[source] = i
            if opcode == "bitcast":
                last["view", name] = tuple(names)
            size = math.prod(map(int, shape.split(","))) if shape else 1
            if opcode == "fusion" and dtype == "f32" and size >= least and "u8" in map(kinds.get, names):
                born[name] = (i, 4 * size)
        spans = [(start, last.get(name, start), size) for name, (start, size) in born.items()]
        most = max([most, *(sum(s for a, b, s in spans if a <= start <= b) for start, _, _ in spans)])
    return most


WIDE = {"model__n_layers": 2, "model__d_model": 128, "model__n_kv_heads": 4, "model__head_dim": 32, "model__d_ff": 256}
LAYER = 4 * (4 * 128 * 128 + 3 * 128 * 256)  # bytes of a layer's kernels in float32
SMALLEST = 128 * 128


@pytest.mark.parametrize(
    "changes",
    [{"model__remat": "none", "train__microbatch_size": 4}, {"model__remat": "full", "model__scan_layers": True}],
)
def test_no_more_than_one_layer_is_decoded_at_a_time(changes):
    c = config_of("nf4", **(WIDE | changes))
    program = made_of(c).lower().compile(compiler_options=tiny.AS_USERS)
    assert SMALLEST * 4 <= most_decoded(program.as_text(), SMALLEST) <= LAYER


def test_decoding_all_layers_first_is_noticed():
    c = config_of("nf4", **(WIDE | {"model__remat": "none"}))
    program = parts.make(c, make_mesh(), decoded_first, lora(c.adapter)).lower().compile(compiler_options=tiny.AS_USERS)
    assert most_decoded(program.as_text(), SMALLEST) >= 2 * LAYER
