"""The files are run as their readers run them: a wrong layout is found, whatever reads it back."""

import dataclasses
import functools
import json

import numpy as np
import pytest
import tiny_data
import tiny_models as tiny
from interop import reader

from jaxlm import models
from jaxlm.devices import tree
from jaxlm.interop import export, gguf, hf_folder, leaves

SQUARE = {"d_ff": 32, "n_kv_heads": 4}  # every matrix of a layer is square: its shape tells nothing
BOUNDS = {"f32": 1e-5, "f16": 5e-3, "bf16": 5e-2, "q8_0": 5e-2}  # by which rounding moves the logits at most
TOKENS = np.random.default_rng(0).integers(0, 300, (1, 32))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tiny_data.make(tmp_path_factory.mktemp("data"), {"a": 1.0}).tokenizer()


@pytest.fixture(scope="module")
def source(tokenizer):
    """The model's keys -> what is exported of random parameters, and its logits. The same keys are computed once."""

    @functools.cache
    def make(keys) -> tuple[export.Source, np.ndarray]:
        config = tiny.model_config(vocab_size=tokenizer.vocab_size, **dict(keys))
        model = models.build(config, "xla")
        params = tiny.random_params(model)
        values = {name: np.asarray(leaf) for name, leaf in tree.named_leaves(params)}
        given = export.Source(values.__getitem__, config, tokenizer, "tiny", {}, "# card\n")
        return given, np.asarray(tiny.jit(lambda p, t: tiny.logits(model, p, t))(params, TOKENS))

    return lambda **keys: make(tuple(keys.items()))


def written(to, folder, given, dtype="f32"):
    """Returns what reads the files that are written, unchecked."""
    folder.mkdir()
    if to == "hf":
        hf_folder.HfFolder(folder, given.config, dtype).write(given.read, given.tokenizer, lambda done: None)
        return folder
    place = folder / "tiny.gguf"
    gguf.GgufFile(place, given.config, dtype, "tiny").write(given.read, given.tokenizer, lambda done: None)
    return place


def logits_of(place) -> np.ndarray:
    model, tensors = reader.of_folder(place) if place.is_dir() else reader.of_file(place)
    return model.logits(tensors, TOKENS)


def gap(wanted, found) -> float:
    """The root mean square of the difference, relative to that of `wanted`."""
    return float(np.sqrt(np.mean(np.square(wanted - found)) / np.mean(np.square(wanted))))


@pytest.mark.parametrize("to", ["hf", "gguf"])
@pytest.mark.parametrize("case", tiny.EXPORTED)
def test_the_files_give_the_runs_numbers(source, tmp_path, case, to):
    if (case, to) == ("biases_wide_heads", "gguf"):
        pytest.skip("GGUF has no place for these biases")
    given, wanted = source(**tiny.EXPORTED[case])
    for dtype in export.TARGETS[to] if case == "gqa_tied" else ("f32",):
        moved = gap(wanted, logits_of(export.export(given, to, dtype, tmp_path / dtype).place))
        assert moved < BOUNDS[dtype]
        assert dtype == "f32" or moved > 1e-5


def unpermuted(monkeypatch):
    monkeypatch.setattr(gguf.GgufFile, "_heads", lambda self, tensor: 0)


def table(monkeypatch, change):
    """Every tensor of a Llama goes through `change`."""
    made = leaves._llama
    monkeypatch.setattr(leaves, "_llama", lambda config: map(change, made(config)))


def swapped(monkeypatch):
    other = {"gate_proj": "up_proj", "up_proj": "gate_proj"}

    def change(tensor):
        *front, name, end = tensor.name.split(".")
        return dataclasses.replace(tensor, name=".".join([*front, other.get(name, name), end]))

    table(monkeypatch, change)


def not_transposed(*which):
    def mutate(monkeypatch):
        def change(tensor):
            wrong = tensor.name.endswith(tuple(f"{name}.weight" for name in which))
            return dataclasses.replace(tensor, transposed=False) if wrong else tensor

        table(monkeypatch, change)

    return mutate


MUTATIONS = {
    "q and k not permuted": unpermuted,
    "gate and up swapped": swapped,
    "gate not transposed": not_transposed("gate_proj"),
    "q and k not transposed": not_transposed("q_proj", "k_proj"),
    "o not transposed": not_transposed("o_proj"),
}


@pytest.mark.parametrize(
    ("mutation", "dtype"),
    [(name, dtype) for name in MUTATIONS for dtype in ("bf16", "q8_0") if dtype == "q8_0" or "permuted" not in name],
)
def test_a_wrong_layout_is_found_whatever_reads_it_back(source, tmp_path, monkeypatch, mutation, dtype):
    """The mutations: each moves the logits more than the coarsest rounding may."""
    given, wanted = source(**SQUARE)
    MUTATIONS[mutation](monkeypatch)
    place = written("hf" if dtype == "bf16" else "gguf", tmp_path / "out", given, dtype)
    with pytest.raises(AssertionError, match=r"model\.layers\.0|blk\.0|too far"):
        assert gap(wanted, logits_of(place)) < 2 * BOUNDS[dtype], "too far"


def test_the_factors_of_the_rotary_frequencies_are_read(source, tmp_path):
    given, wanted = source(**tiny.EXPORTED["llama3_scaling"])
    place = written("gguf", tmp_path / "out", given)
    assert gap(wanted, logits_of(place)) < BOUNDS["f32"]
    place.write_bytes(place.read_bytes().replace(b"rope_freqs.weight", b"rope_other.weight"))
    with pytest.raises(AssertionError, match=r"no reader looks for .*rope_other"):
        logits_of(place)


def test_both_ways_to_say_the_rotary_settings_are_the_same(source, tmp_path):
    place = written("hf", tmp_path / "out", source(rope_theta=500000.0)[0])
    path = place / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_theta": 10000.0}))
    with pytest.raises(AssertionError, match="rope"):
        logits_of(place)


def test_a_tensor_that_no_reader_looks_for_is_found(source, tmp_path):
    place = written("hf", tmp_path / "out", source(bias=True)[0])
    path = place / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attention_bias": False, "mlp_bias": False}))
    with pytest.raises(AssertionError, match=r"no reader looks for .*model\.layers\.0\.self_attn\.q_proj\.bias"):
        logits_of(place)
