"""The files are run as their readers run them: a wrong layout is found, whatever reads it back."""

import dataclasses
import json

import numpy as np
import pytest
import tiny_data
import tiny_models as tiny

from jaxlm import models, tree
from jaxlm.config import RunError
from jaxlm.interop import check, export, gguf_file, hf_folder, leaves

SQUARE = {"d_ff": 32, "n_kv_heads": 4}  # every matrix of a layer is square: its shape tells nothing


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tiny_data.make(tmp_path_factory.mktemp("data"), {"a": 1.0}).tokenizer()


def source(tokenizer, **overrides) -> export.Source:
    cfg = tiny.model_config(vocab_size=tokenizer.vocab_size, **overrides)
    values = {name: np.asarray(leaf) for name, leaf in tree.named_leaves(tiny.random_params(models.build(cfg, "xla")))}
    return export.Source(values.__getitem__, cfg, tokenizer, "tiny", {}, lambda verdict: "# card\n")


@pytest.mark.parametrize("to", ["hf", "gguf"])
@pytest.mark.parametrize("case", tiny.EXPORTED)
def test_the_files_give_the_runs_numbers(tokenizer, tmp_path, case, to):
    if (case, to) == ("biases_wide_heads", "gguf"):
        pytest.skip("GGUF has no place for these biases")
    given = source(tokenizer, **tiny.EXPORTED[case])
    assert export.export(given, to, "f32", tmp_path / "f32").verdict.moved < 1e-5
    assert 1e-5 < export.export(given, to, "f16", tmp_path / "f16").verdict.moved < 0.05


def unpermuted(monkeypatch):
    monkeypatch.setattr(gguf_file.Layout, "_heads", lambda self, tensor: 0)


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


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0"])
@pytest.mark.parametrize("shape", [{}, SQUARE], ids=["oblong", "square"])
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_wrong_layout_is_found_whatever_reads_it_back(tokenizer, tmp_path, monkeypatch, mutation, shape, dtype):
    given = source(tokenizer, **shape)
    targets = [to for to in ("hf", "gguf") if dtype in export.TARGETS[to]]
    if mutation == "q and k not permuted":
        targets = [to for to in targets if to == "gguf"]
    if not targets:
        pytest.skip("only GGUF permutes, and has no bf16")
    for to in targets:
        export.export(given, to, dtype, tmp_path / f"right_{to}")
    MUTATIONS[mutation](monkeypatch)
    for to in targets:
        with pytest.raises(RunError, match=r"layers_0 is off by|model\.layers\.0|blk\.0") as error:
            export.export(given, to, dtype, tmp_path / f"wrong_{to}")
        assert "\n" not in str(error.value)
    assert {path.name for path in tmp_path.iterdir()} == {f"right_{to}" for to in targets}


def written(to, folder, given):
    folder.mkdir()
    if to == "hf":
        made = hf_folder.HfFolder(folder, given.config, "f32")
    else:
        made = gguf_file.GgufFile(folder / "tiny.gguf", given.config, "f32", "tiny")
    made.write(given.read, given.tokenizer, lambda done: None)
    return made


def fails(given, made) -> str:
    with pytest.raises(RunError) as error:
        check.check(given.read, made, given.config, lambda done: None)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_setting_that_gguf_lacks_is_no_setting_that_is_right(tokenizer, tmp_path, monkeypatch):
    import gguf

    given = source(tokenizer)
    monkeypatch.setattr(gguf.GGUFWriter, "add_rope_freq_base", lambda self, value: None)
    assert "lacks the setting llama.rope.freq_base" in fails(given, written("gguf", tmp_path / "out", given))


def test_the_factors_of_the_rotary_frequencies_are_read_back(tokenizer, tmp_path):
    given = source(tokenizer, **tiny.EXPORTED["llama3_scaling"])
    made = written("gguf", tmp_path / "out", given)
    (path,) = (tmp_path / "out").iterdir()
    content, factors = path.read_bytes(), made.held("rope_freqs.weight")
    assert factors.max() == 4
    path.write_bytes(content.replace(factors.tobytes(), np.ones_like(factors).tobytes()))
    assert "rope_freqs.weight differs" in fails(given, made)
    path.write_bytes(content.replace(b"rope_freqs.weight", b"rope_other.weight"))
    assert "model.rope.scaling is none" in fails(given, gguf_file.GgufFile(path, given.config, "f32", "tiny"))


def test_both_ways_to_say_the_rotary_settings_are_compared(tokenizer, tmp_path):
    given = source(tokenizer, rope_theta=500000.0)
    made = written("hf", tmp_path / "out", given)
    path = tmp_path / "out/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_theta": 10000.0}))
    assert "rope_parameters" in fails(given, made)


def test_a_tensor_that_no_reader_looks_for_is_found(tokenizer, tmp_path):
    given = source(tokenizer, bias=True)
    made = written("hf", tmp_path / "out", given)
    path = tmp_path / "out/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attention_bias": False, "mlp_bias": False}))
    model = made.reference()
    held = {
        name: np.ones(shape, np.float32) for name, shape in shapes(given.config) if name.startswith("model.layers.0")
    }
    with pytest.raises(RunError, match=r"has model\.layers\.0\.self_attn\.q_proj\.bias, which its readers"):
        model.layer(held, 0, np.ones((1, 3, given.config.d_model), np.float32))


def shapes(config):
    return [(tensor.name, tensor.shape) for tensor in leaves.tensors(config)]
