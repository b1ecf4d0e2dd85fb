"""Weights of a Hugging Face folder: whole, sharded, of every type; the logits are those of transformers."""

import dataclasses
import json

import jax
import ml_dtypes
import numpy as np
import pytest
import tiny_hf
import tiny_models as tiny
from tiny_steps import make_mesh

from jaxlm import models
from jaxlm.config import ConfigError, RunError
from jaxlm.devices import sharding, tree
from jaxlm.interop import hf_config, hf_folder, peft
from jaxlm.train import origin

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
# Class of transformers, settings; the shapes of all are in `theirs`.
FAMILIES = {
    "llama_2": ("Llama", {"tie_word_embeddings": False}),
    "llama_3_gqa": ("Llama", {"num_key_value_heads": 2, "rope_parameters": LLAMA3, "tie_word_embeddings": False}),
    "smollm_tied_theta": (
        "Llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "num_key_value_heads": 1},
    ),
    "llama_biases_wide_heads": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "mistral": ("Mistral", {"sliding_window": None, "num_key_value_heads": 2}),
    "qwen2_biases": ("Qwen2", {"num_key_value_heads": 2}),
    "qwen3_qk_norm": ("Qwen3", {"head_dim": 16, "num_key_value_heads": 2}),
    "padded_vocabulary": ("Llama", {"vocab_size": 32_005, "hidden_size": 16, "intermediate_size": 16}),
    "gpt2": ("GPT2", {}),
}


def params_of(folder, mesh):
    found = origin.open(folder, readers=peft.READERS)
    model = models.build(dataclasses.replace(found.config.model, dtype="float32"), "xla")
    abstract = models.abstract_params(model)
    shardings = sharding.tree_shardings(abstract, models.logical_axes(model), mesh)
    return model, found.params(abstract, shardings), shardings


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


@pytest.mark.parametrize(("files", "dtype"), [(1, np.float32), (3, ml_dtypes.bfloat16), (1, np.float16)])
def test_sharded_is_one_device_and_what_was_written(tmp_path, files, dtype):
    _, given = tiny_hf.weights(tmp_path, files, dtype, n_heads=4, n_kv_heads=2, tie_embeddings=False)
    _, one, _ = params_of(tmp_path, make_mesh())
    _, many, placed = params_of(tmp_path, make_mesh(fsdp=4, tensor=2))
    assert jax.tree.map(lambda x: x.sharding, many) == placed
    assert_same(one, many)
    pad = one["embed"]["embedding"][101:]
    assert not np.asarray(pad).any()
    rounded = jax.tree.map(lambda x: np.asarray(np.asarray(x, dtype), np.float32), given)
    assert_same(
        tiny_hf.params_to_hf(one, tiny.model_config(tie_embeddings=False)),
        tiny_hf.params_to_hf(rounded, tiny.model_config(tie_embeddings=False)),
    )
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(one))


def test_gpt2_of_the_hub_has_no_prefix(tmp_path):
    config, given = tiny_hf.weights(tmp_path / "a", family="gpt2")
    state = {name.removeprefix("transformer."): value for name, value in tiny_hf.params_to_hf(given, config).items()}
    tiny_hf.save(tmp_path / "b", state | {"h.0.attn.bias": np.ones((1, 1, 8, 8), np.uint8)})
    (tmp_path / "b/config.json").write_bytes((tmp_path / "a/config.json").read_bytes())
    assert_same(params_of(tmp_path / "a", make_mesh())[1], params_of(tmp_path / "b", make_mesh())[1])


def test_tensors_that_are_not_as_they_must_be_are_named(tmp_path):
    config, given = tiny_hf.weights(tmp_path)
    state = tiny_hf.params_to_hf(given, config)
    name = "model.layers.1.mlp.up_proj.weight"
    for wrong, message in (
        ({k: v for k, v in state.items() if k != name}, f"{name} is missing"),
        (state | {name: np.ascontiguousarray(state[name].T)}, f"{name} has shape"),
        (state | {"model.layers.2.mlp.up_proj.weight": state[name]}, "fit nowhere, first model.layers.2"),
        (state | {name: state[name].astype(np.int8)}, f"{name} is of type I8"),
    ):
        tiny_hf.save(tmp_path, wrong)
        with pytest.raises(ConfigError, match=message) as error:
            params_of(tmp_path, make_mesh())
        assert "\n" not in str(error.value)


def test_files_that_are_not_there_or_damaged(tmp_path):
    tiny_hf.weights(tmp_path, files=2)
    for path in tmp_path.glob("*00002-of-00002.safetensors"):
        path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(RunError, match=r"00002-of-00002\.safetensors can't be read .*: copy it again"):
        params_of(tmp_path, make_mesh())
    path.unlink()
    with pytest.raises(ConfigError, match="lacks model-00002-of-00002"):
        params_of(tmp_path, make_mesh())
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(ConfigError, match=r"index\.json is damaged"):
        params_of(tmp_path, make_mesh())
    for file in (index, *tmp_path.glob("*.safetensors")):
        file.unlink()
    with pytest.raises(ConfigError, match="has no weights"):
        params_of(tmp_path, make_mesh())
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"has pytorch_model\.bin and no safetensors: convert it .*save_pretrained"):
        params_of(tmp_path, make_mesh())
    (tmp_path / "config.json").write_text(json.dumps({"train": {}}))
    assert hf_folder.read(tmp_path) is None


def with_head(folder, head: str, files: int = 1, **keys):
    """A tied model in a folder, beside whose embedding lies a head: its copy, or another one. Returns (config, the head)."""
    config, params = tiny_hf.weights(folder, **{"max_seq_len": 64, "vocab_size": 101, **keys})
    state = tiny_hf.params_to_hf(params, config)
    table = next(iter(state.values()))
    other = np.random.default_rng(1).normal(size=table.shape).astype(np.float32)
    table = {"equal": table, "differs": other, "last row": table.copy(), "rounded": table.astype(ml_dtypes.bfloat16)}[
        head
    ]
    if head == "last row":
        table[-1, -1] += 1
    (folder / "model.safetensors").unlink()
    tiny_hf.save(folder, state | {"lm_head.weight": table}, files)
    return config, table


@pytest.mark.parametrize(("family", "files"), [("llama", 3), ("gpt2", 1)])
@pytest.mark.parametrize("head", ["equal", "differs", "last row", "rounded"])
def test_a_head_of_its_own_in_a_tied_model_is_used_and_said(tmp_path, monkeypatch, family, files, head):
    monkeypatch.setattr(hf_config, "_PIECE", 40)  # of 101 rows
    _, table = with_head(tmp_path, head, files, family=family)
    keys, lines, _ = hf_config.read(tmp_path)
    assert (keys["tie_embeddings"], lines) == (head == "equal", [])
    said = hf_config.read(tmp_path)[2]
    if head == "equal":
        assert said == []
        params_of(tmp_path, make_mesh())
        return
    assert len(said) == 1
    assert "lm_head.weight differs from the embedding: the head is used" in said[0]
    _, params, _ = params_of(tmp_path, make_mesh())
    np.testing.assert_array_equal(params["head"]["kernel"][:, :101], np.asarray(table.T, np.float32))


def test_head_and_embedding_are_compared_once_until_the_file_is_another(tmp_path, monkeypatch):
    """Tables of a real model take seconds, and a start asks three times."""
    compared, equal = [], np.array_equal
    monkeypatch.setattr(np, "array_equal", lambda *pair: compared.append(1) or equal(*pair))
    with_head(tmp_path, "equal")
    for _ in range(2):
        assert (hf_config.read(tmp_path)[0]["tie_embeddings"], hf_config.read(tmp_path)[2]) == (True, [])
    assert len(compared) == 1
    with_head(tmp_path, "differs")
    assert (hf_config.read(tmp_path)[0]["tie_embeddings"], len(hf_config.read(tmp_path)[2])) == (False, 1)
    assert len(compared) == 2


def test_a_run_that_took_such_a_model_as_tied_still_reads_its_base(tmp_path):
    """An adapter's run reads the leaves that its own config has, and knows its base by the digest of all tensors."""
    config, _ = with_head(tmp_path, "differs")
    found = origin.open(tmp_path, readers=peft.READERS)
    names = [name for name, _ in tree.named_leaves(models.abstract_params(models.build(config, "xla")))]
    assert "head/kernel" not in names
    read = {name: found.leaf(name) for name in names}
    assert read["embed/embedding"].shape == (128, config.d_model)
    assert found.digest() == hf_folder.Files(tmp_path).digest()


def test_of_one_file_and_an_index_the_one_file_is_read_and_it_is_said(tmp_path):
    tiny_hf.weights(tmp_path / "a")
    tiny_hf.weights(tmp_path / "b", files=2)
    wanted = params_of(tmp_path / "a", make_mesh())[1]
    for path in (tmp_path / "b").glob("model*"):
        state = path.read_bytes()
        (tmp_path / "a" / path.name).write_bytes(state)
    assert hf_config.read(tmp_path / "b")[2] == []
    (said,) = hf_config.read(tmp_path / "a")[2]
    assert said.endswith(
        "has model.safetensors and model.safetensors.index.json: the first is read, as transformers does"
    )
    (tmp_path / "a/model-00001-of-00002.safetensors").unlink()  # nobody reads it
    assert_same(params_of(tmp_path / "a", make_mesh())[1], wanted)


@pytest.mark.parity
@pytest.mark.parametrize(
    ("family", "head"),
    [
        ("llama", "equal"),
        ("gpt2", "differs"),
        ("qwen2", "last row"),
        ("llama", "rounded"),
        ("llama", "beside an index"),
    ],
)
def test_a_tied_model_with_a_head_gives_what_transformers_gives(tmp_path, family, head):
    import torch
    import transformers

    torch.set_num_threads(1)
    keys = {"qwen2": {"qkv_bias": True}, "gpt2": {"family": "gpt2"}}.get(family, {})
    with_head(tmp_path, "differs" if head == "beside an index" else head, **keys)
    if head == "beside an index":
        other = tmp_path / "other"
        with_head(other, "equal", 2, **keys)
        for path in other.glob("model*"):
            (tmp_path / path.name).write_bytes(path.read_bytes().replace(b"\x3d", b"\x3c"))
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = np.random.default_rng(0).integers(0, 101, (2, 24))
    with torch.no_grad():
        wanted = reference(torch.from_numpy(tokens)).logits.numpy()
    model, params, _ = params_of(tmp_path, make_mesh())
    found = np.asarray(tiny.jit(lambda p: tiny.logits(model, p, tokens))(params))
    assert np.abs(found - wanted).max() / np.abs(wanted).max() < 1e-4
    assert model.config.tie_embeddings == (head == "equal")


def theirs(family, folder, dtype):
    """A randomly initialised model of transformers, saved in a folder; norms and biases are off their neutral values."""
    import torch
    import transformers

    torch.manual_seed(0)
    name, settings = FAMILIES[family]
    if name == "GPT2":
        shapes = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 101}
    else:
        shapes = {
            "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 4, "max_position_embeddings": 64, "vocab_size": 101, "tie_word_embeddings": True,
        }  # fmt: skip
    config = getattr(transformers, f"{name}Config")(**shapes | settings)
    model = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return type(model).from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parity
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family, tmp_path):
    import torch

    torch.set_num_threads(1)
    reference = theirs(family, tmp_path, "bfloat16" if family == "llama_2" else "float32")
    model, params, _ = params_of(tmp_path, make_mesh(fsdp=2))
    tokens = np.random.default_rng(0).integers(0, 101, (2, 24))
    with torch.no_grad():
        wanted = reference(torch.from_numpy(tokens)).logits.numpy()
    found = np.asarray(tiny.jit(lambda p: tiny.logits(model, p, tokens))(params))
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() / np.abs(wanted).max() < 1e-4
    # One leaf that is not theirs is seen.
    wrong = tree.map_named(lambda name, x: x * 1.1 if name == "layers_1/attn/v/kernel" else x, params)
    other = np.asarray(tiny.jit(lambda p: tiny.logits(model, p, tokens))(wrong))
    assert np.abs(other - wanted).max() / np.abs(wanted).max() > 1e-4
