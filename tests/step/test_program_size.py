"""The size of the compiled train step, pinned: a change that makes XLA do more work shows here before it shows in hours.

XLA's own passes decide these numbers, so they are pinned for one version of jax; machine code generation, which the
tests turn off to compile fast, does not touch them. When a change that was measured to be no slower moves them, pin what the
failure shows.
"""

import collections
import dataclasses
import re

import jax
import pytest
import tiny_models as tiny

from jaxlm import config
from jaxlm.config import config_files
from jaxlm.devices import sharding
from jaxlm.models import hardware
from jaxlm.plan import lower

JAX = "0.10"
PINNED = {"all": 4423, "fusion": 352, "dot": 41, "custom-call": 0, "copy": 67, "transpose": 34, "while": 2}
PINNED["sine"] = 1  # RoPE's tables are made once, and not in every layer
BAND = 0.03  # processors differ a little in what XLA fuses for them
SHAPE = {"n_layers": 2, "d_model": 64, "n_heads": 4, "n_kv_heads": 2, "d_ff": 160, "vocab_size": 512}

pytestmark = pytest.mark.skipif(
    not jax.__version__.startswith(f"{JAX}."), reason=f"pinned for jax {JAX}, this is {jax.__version__}"
)


def program_size(*overrides: str) -> dict[str, int]:
    """HLO instructions of the optimised step of a two-layer llama on one CPU device: all, and by opcode."""
    keys = ["data.path=x", "train.batch_size=2", "train.seq_len=128", "loss.tile_tokens=128"]
    keys += [f"model.{key}={value}" for key, value in SHAPE.items()]
    c = config.resolve(config_files.load("base", [*keys, *overrides]))
    c = dataclasses.replace(c, model=hardware.for_platform(c.model, "cpu"))
    lowered = lower.parts_of(c, sharding.make_mesh(c.mesh, jax.devices()[:1])).lower()
    line = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = (?:\(.*?\)|\S+) ([a-z][\w-]*)\(", re.M)
    compiled = lowered.compile(compiler_options=tiny.AS_USERS)
    counts = collections.Counter(line.findall(compiled.as_text()))
    return {"all": counts.total(), **{opcode: counts[opcode] for opcode in PINNED if opcode != "all"}}


def check(sizes: dict[str, int]) -> None:
    off = {k: (n, PINNED[k]) for k, n in sizes.items() if abs(n - PINNED[k]) > BAND * PINNED[k]}
    assert not off, f"instructions, now and pinned: {off}; all now: {sizes}"


def test_the_step_is_as_small_as_it_was():
    check(program_size())


@pytest.mark.parametrize("override", ["model.remat=full", "model.fuse_projections=False"])
def test_a_larger_step_is_noticed(override):
    with pytest.raises(AssertionError, match=r"now and pinned: .*'dot'"):
        check(program_size(override))
