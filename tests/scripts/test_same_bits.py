"""scripts/same_bits.py: what it reads of a run, and that it tells any difference; whole comparisons are run by hand."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import same_bits


def save(path: pathlib.Path, x: jnp.ndarray) -> pathlib.Path:
    """A checkpoint with two items, as Orbax writes it."""
    handlers = {name: ocp.StandardCheckpointHandler() for name in ("params", "train")}
    with ocp.CheckpointManager(path, item_handlers=handlers) as manager:
        items = {"params": {"layers_0": {"kernel": x}}, "train": {"step": jnp.int32(1)}}
        manager.save(1, args=ocp.args.Composite(**{k: ocp.args.StandardSave(v) for k, v in items.items()}))
    return path / "1"


def test_one_bit_of_an_array_shows(tmp_path):
    x = jnp.arange(6, dtype=jnp.float32).reshape(2, 3)
    other = x.at[1, 2].set(jnp.nextafter(x[1, 2], jnp.float32(9)))
    a, again, b = (same_bits.arrays(save(tmp_path / name, v)) for name, v in (("a", x), ("again", x + 0), ("b", other)))
    assert list(a) == ["params/layers_0.kernel", "train/step"]
    assert a["params/layers_0.kernel"].startswith("float32 2x3 ")
    assert a == again
    assert [name for name in a if a[name] != b[name]] == ["params/layers_0.kernel"]
    # The type and the shape count too, where the bytes are the same.
    bits = jnp.asarray(np.asarray(x).view(np.int32))
    assert same_bits.arrays(save(tmp_path / "int", bits)) != a
    assert same_bits.arrays(save(tmp_path / "shape", x.reshape(3, 2))) != a


def test_no_arrays_are_an_error(tmp_path):
    with pytest.raises(same_bits.CannotRunError, match="no arrays"):
        same_bits.arrays(tmp_path)


def test_metrics_merge_the_lines_of_a_step_in_any_order(tmp_path):
    lines = [
        {"step": 1, "train/loss": 0.1, "wall_s": 1.0},
        {"step": 2, "train/loss": 0.2},
        {"step": 2, "val/loss": 3.0},
    ]
    read = []
    for order in ((0, 1, 2), (0, 2, 1)):
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(lines[i]) + "\n" for i in order))
        read.append(same_bits.metrics(tmp_path / "metrics.jsonl"))
    both = {"1": {"step": 1, "train/loss": 0.1}, "2": {"step": 2, "train/loss": 0.2, "val/loss": 3.0}}
    assert read == [both, both]


RESULT = {"manifest": "m", "step": 2, "metrics": {"9": {"loss": 0.5}, "10": {"loss": 0.1}}, "arrays": {"params/a": "x"}}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"manifest": "n"}, "manifest of the data: m -> n"),
        ({"step": 3}, "step of the last checkpoint: 2 -> 3"),
        ({"arrays": {"params/a": "y"}}, "array params/a: x -> y"),
        ({"arrays": {}}, "array params/a: x -> absent"),
        ({"metrics": {"9": {"loss": 0.5}, "10": {"loss": 0.10000000000000002}}}, "step 10 loss: 0.1 -> 0.10000000000000002"),
        ({"metrics": {"9": {"loss": 0.5, "new": 1}, "10": {"loss": 0.2}}}, "step 9 new: absent -> 1"),
        ({"metrics": {"9": {"loss": 0.5}}}, "step 10 loss: 0.1 -> absent"),
    ],
)  # fmt: skip
def test_every_difference_is_told_the_earliest_first(change, said):
    assert same_bits.differences(RESULT, RESULT) == []
    assert same_bits.differences(RESULT, RESULT | change)[0] == said
