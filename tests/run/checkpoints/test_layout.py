"""The state as items of a checkpoint, and back."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlm.devices import tree
from jaxlm.run.checkpoints import meta
from jaxlm.step import state

TX = optax.adam(1e-3)
KERNEL = {"layers_0": {"up": {"kernel": jnp.ones((2, 3))}}}


def names(made):
    return [name for name, _ in tree.named_leaves(meta.to_items(made))]


def test_pretraining_is_laid_out_as_it_always_was():
    """Checkpoints of older versions hold these names: moments and digests do not know of collections."""
    assert names(state.init({"params": KERNEL}, TX)) == [
        "params/layers_0/up/kernel",
        "train/opt_state/0/count",
        "train/opt_state/0/mu/layers_0/up/kernel",
        "train/opt_state/0/nu/layers_0/up/kernel",
        "train/skipped",
        "train/skipped_in_a_row",
        "train/step",
    ]


def test_other_collections_stand_beside_and_running_is_there_when_there_is_any():
    lora = {"layers_0": {"up": {"lora_a": jnp.ones((2, 1)), "lora_b": jnp.ones((1, 3))}}}
    made = state.init({"lora": lora, "value": {"value_head": {"kernel": jnp.ones(2)}}}, TX, {"kl": 0.5})
    found = names(made)
    assert "lora/layers_0/up/lora_a" in found
    assert "value/value_head/kernel" in found
    assert "train/opt_state/0/mu/layers_0/up/lora_b" in found
    assert "train/running/kl" in found
    assert not [name for name in found if name.startswith("params/")]


def test_names_of_items_are_taken():
    with pytest.raises(ValueError, match="a collection of variables is called meta"):
        meta.to_items(state.init({"meta": KERNEL}, TX))


@pytest.mark.parametrize(("collection", "running"), [("params", {}), ("lora", {"kl": 0.5})])
def test_back_again(collection, running):
    made = state.init({collection: KERNEL}, TX, running)
    back = meta.from_items(meta.to_items(made), like=jax.eval_shape(lambda: made))
    jax.tree.map(np.testing.assert_array_equal, back, made)
    assert back.running.keys() == running.keys()
