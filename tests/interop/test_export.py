"""What is exported is the run's to the bit, a folder is replaced whole or not at all, and damage is caught before `done`."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest
import tiny_data
import tiny_models as tiny
import tiny_peft

from jaxlm import models
from jaxlm.config import ConfigError, RunError
from jaxlm.devices import tree
from jaxlm.interop import export, gguf, hf_folder, leaves, peft, peft_config

CASES = {
    "gqa_tied": {"n_kv_heads": 2, "tie_embeddings": True},
    "gpt2_untied": {"family": "gpt2", "tie_embeddings": False},
    "llama3_scaling": {"rope_theta": 500000.0, "rope_scaling": "llama3", "rope_factor": 4.0,
     "rope_low_freq_factor": 1.0, "rope_high_freq_factor": 4.0, "rope_original_max_len": 16},
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tiny_data.make(tmp_path_factory.mktemp("data"), {"a": 1.0}).tokenizer()


def source(tokenizer, dtype=np.float32, **overrides) -> export.Source:
    """A model with random parameters, and the tokenizer of the tiny data."""
    cfg = tiny.model_config(vocab_size=tokenizer.vocab_size, **overrides)
    params = tiny.random_params(models.build(cfg, "xla"))
    values = {name: np.asarray(leaf, dtype) for name, leaf in tree.named_leaves(params)}
    return export.Source(values.__getitem__, cfg, tokenizer, "tiny", {"run": "tiny", "step": 7}, "# card\n")


@pytest.mark.parametrize(
    ("case", "to", "dtype"),
    [("gqa_tied", "hf", "bf16"), ("gpt2_untied", "gguf", "f16"), ("llama3_scaling", "gguf", "q8_0")],
)
def test_what_is_written_is_the_runs(tokenizer, tmp_path, case, to, dtype):
    given = source(tokenizer, **CASES[case])
    done = export.export(given, to, dtype, tmp_path / "out")
    assert done.tensors >= len(list(leaves.tensors(given.config)))
    assert json.loads((tmp_path / "out" / export.MARK).read_text())["step"] == 7
    assert done.place.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_export_replaces_an_earlier_one_of_its_kind_alone(tokenizer, tmp_path):
    out = tmp_path / "out"
    export.export(source(tokenizer), "hf", "f32", out / "hf")
    before = (out / "hf" / "model.safetensors").stat().st_size
    export.export(source(tokenizer), "hf", "bf16", out / "hf")
    assert (out / "hf" / "model.safetensors").stat().st_size < before
    with pytest.raises(ConfigError, match="holds an export to hf"):
        export.export(source(tokenizer), "gguf", "f16", out / "hf")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="not empty"):
        export.export(source(tokenizer), "hf", "bf16", tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.tex").exists()


def test_what_lies_beside_an_earlier_export_is_named_and_kept(tokenizer, tmp_path):
    """The user's own files, and eval/, which `jaxlm eval` writes there."""
    out = tmp_path / "out"
    export.export(source(tokenizer), "hf", "f32", out)
    (out / "notes.txt").touch()
    (out / "eval").mkdir()
    with pytest.raises(ConfigError, match=r"holds eval/, notes.txt beside an earlier export .*: give another folder"):
        export.export(source(tokenizer), "hf", "bf16", out)
    assert (out / "notes.txt").exists()
    assert (out / "eval").exists()


def test_a_failed_export_leaves_the_earlier_one(tokenizer, tmp_path):
    out = tmp_path / "out"
    export.export(source(tokenizer), "hf", "f32", out)
    before = (out / "model.safetensors").read_bytes()

    def broken(leaf):
        raise OSError(28, "No space left on device")

    with pytest.raises(RunError, match=r"disk .* is full"):
        export.export(dataclasses.replace(source(tokenizer), read=broken), "hf", "bf16", out)
    assert (out / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    large = source(tokenizer)
    large = dataclasses.replace(large, read=lambda leaf: large_values(source(tokenizer).read(leaf)))
    for to in ("hf", "gguf"):
        with pytest.raises(ConfigError, match="too large for f16"):
            export.export(large, to, "f16", tmp_path / "large")


def large_values(value):
    return value * 1e6


def written(to: str, folder: pathlib.Path, cfg, dtype: str) -> export.Written:
    folder.mkdir()
    if to == "hf":
        return hf_folder.HfFolder(folder, cfg, dtype, shard_bytes=20_000)
    return gguf.GgufFile(folder / "tiny.gguf", cfg, dtype, "tiny")


@pytest.mark.parametrize("to", ["hf", "gguf"])
def test_one_changed_bit_is_found_and_its_leaf_named(tokenizer, tmp_path, to):
    given = source(tokenizer)
    made = written(to, tmp_path / "out", given.config, "f16")
    made.write(given.read, tokenizer, lambda done: None)
    assert export.check(made, given.read, lambda done: None) == len(list(leaves.tensors(given.config)))
    files = [path for path in made_files(tmp_path / "out") if path.stat().st_size > 4000]
    where = np.asarray(given.read("layers_1/mlp/up/kernel"), np.float16).T.tobytes()[:64]
    path = next(path for path in files if where in path.read_bytes())
    content = bytearray(path.read_bytes())
    content[content.index(where) + 10] ^= 1
    path.write_bytes(content)
    with pytest.raises(RunError, match="layers_1/mlp/up/kernel") as error:
        export.check(made, given.read, lambda done: None)
    assert "\n" not in str(error.value)


def made_files(folder):
    return sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".gguf"))


def test_weights_are_split_into_files_with_an_index(tokenizer, tmp_path):
    from safetensors.numpy import load_file

    given = source(tokenizer)
    made = written("hf", tmp_path / "out", given.config, "f32")
    made.write(given.read, tokenizer, lambda done: None)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    names = [path.name for path in made_files(tmp_path / "out")]
    assert len(names) > 3
    assert sorted(set(index["weight_map"].values())) == names
    tensors = {k: v for name in names for k, v in load_file(tmp_path / "out" / name).items()}
    assert tensors.keys() == index["weight_map"].keys()
    assert sum(value.nbytes for value in tensors.values()) == index["metadata"]["total_size"]


def test_an_adapter_is_read_back_to_the_bit(tokenizer, tmp_path):
    given = source(tokenizer)
    params = tree.nested((name, given.read(name)) for tensor in leaves.tensors(given.config) for name in tensor.leaves)
    adapted = tiny_peft.adapted(params, (1, 2))
    given = dataclasses.replace(given, adapted=adapted, base=("base", "7"))
    for dtype in export.TARGETS["peft"]:
        out = tmp_path / dtype
        done = export.export(given, "peft", dtype, out)
        content, tensors = peft.read_files(out)
        assert (content["revision"], len(tensors)) == ("7", done.tensors)
        assert {"README.md", "tokenizer.json", "generation_config.json"} <= {path.name for path in out.iterdir()}
    made = peft.PeftFolder(tmp_path / "f32", given.config, "f32", adapted, given.base)
    path = tmp_path / "f32" / peft_config.WEIGHTS
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(RunError, match=r"what was written is not the run's: base_model.* differs"):
        export.check(made, given.read, lambda done: None)


def test_what_a_format_has_no_place_for_is_refused_in_one_line(tokenizer, tmp_path):
    with pytest.raises(ConfigError, match="--dtype=q8_0"):
        export.dtype_of("hf", "q8_0")
    assert (export.dtype_of("hf", None), export.dtype_of("gguf", None)) == ("bf16", "f16")
    with pytest.raises(ConfigError, match="biases") as error:
        export.export(source(tokenizer, bias=True), "gguf", "f16", tmp_path / "out")
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())
