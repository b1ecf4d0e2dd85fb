"""PEFT and transformers on the adapters that jaxlm writes, and jaxlm on those that PEFT writes: the same logits."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_hf
import tiny_models as tiny
import tiny_peft
from safetensors.numpy import load_file, save_file

from jaxlm import models
from jaxlm.devices import tree
from jaxlm.interop import peft, peft_config
from jaxlm.models.adapters import Adapter

pytestmark = pytest.mark.parity

IDS = (3, 96, 97, 98)  # ascending, as a run has them
CASES = {  # the model's keys, the adapter's, the ids whose rows are trained
    "tied": ({}, {}, IDS),
    "untied": ({"tie_embeddings": False}, {}, IDS),
    "attention_alone": ({}, {"targets": (r"attn/[qv]",)}, ()),
    "down_alone": ({"tie_embeddings": False}, {"targets": (r".*/down",)}, IDS),
    "gpt2": ({"family": "gpt2"}, {"rslora": True}, IDS),
    "gpt2_untied_q_o": ({"family": "gpt2", "tie_embeddings": False}, {"targets": (r"attn/[qo]",)}, ()),
}
TOKENS = np.random.default_rng(0).integers(0, 101, (2, 24))


def base(folder, **keys):
    """A random base as a folder of transformers; its config, parameters and how its leaves are read."""
    config, params = tiny_hf.weights(folder, **keys)
    return config, params, dict(tree.named_leaves(params)).__getitem__


def written(folder, content: dict, tensors: dict):
    folder.mkdir()
    (folder / peft_config.CONFIG).write_text(json.dumps(content))
    save_file(tensors, folder / peft_config.WEIGHTS)
    return folder


def theirs(base_folder):
    import torch
    import transformers

    torch.set_num_threads(1)
    return transformers.AutoModelForCausalLM.from_pretrained(base_folder, dtype="float32").eval()


def their_logits(model, tokens=TOKENS) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.float().numpy()


def our_logits(config, params, tokens=TOKENS) -> np.ndarray:
    params = tree.map_named(lambda _, leaf: jnp.asarray(leaf), params)
    return np.asarray(tiny.logits(models.build(config, "xla"), params, jnp.asarray(tokens)))


def gap(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


@pytest.mark.parametrize("case", CASES)
def test_peft_loads_what_is_written(tmp_path, case):
    from peft import PeftModel

    keys, adapter, ids = CASES[case]
    config, params, read = base(tmp_path / "base", **keys)
    given = tiny_peft.adapted(params, ids, **adapter)
    folder = written(tmp_path / "adapter", *peft.to_peft(given, config, read, (str(tmp_path / "base"), "7")))
    plain = their_logits(theirs(tmp_path / "base"))
    found = their_logits(PeftModel.from_pretrained(theirs(tmp_path / "base"), folder))
    wanted = our_logits(config, tiny_peft.merged(params, given))
    assert gap(found, wanted) < 1e-5
    assert gap(plain, wanted) > 1e-2
    read_back = peft.from_peft(
        json.loads((folder / peft_config.CONFIG).read_text()), load_file(folder / peft_config.WEIGHTS), config, read
    )
    assert gap(our_logits(config, tiny_peft.merged(params, read_back)), wanted) < 1e-6


@pytest.mark.parametrize(
    ("keys", "lora"),
    [
        ({}, {"target_modules": "all-linear", "trainable_token_indices": [5, 96]}),
        ({"tie_embeddings": False}, {"target_modules": r".*\.(q|down)_proj", "use_rslora": True}),
        ({"tie_embeddings": False}, {"target_modules": ["v_proj"], "trainable_token_indices": {"lm_head": [7]}}),
        ({}, {"target_modules": ["q_proj", "up_proj"], "rank_pattern": {"up_proj": 2}, "alpha_pattern": {"q_proj": 5}}),
        ({}, {"target_modules": ["q_proj"], "layers_to_transform": [1]}),
        ({"family": "gpt2"}, {"target_modules": ["c_attn", "mlp.c_proj"], "fan_in_fan_out": True}),
    ],
)
def test_what_peft_writes_is_read(tmp_path, keys, lora):
    import torch
    from peft import LoraConfig, get_peft_model

    config, params, read = base(tmp_path / "base", **keys)
    model = get_peft_model(theirs(tmp_path / "base"), LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **lora))
    torch.manual_seed(0)
    for name, value in model.named_parameters():
        if value.requires_grad:
            torch.nn.init.normal_(value, std=0.3)
            assert "lora" in name or "trainable_tokens" in name
    model.eval().save_pretrained(tmp_path / "adapter")
    content = json.loads((tmp_path / "adapter" / peft_config.CONFIG).read_text())
    peft_config.check(content)
    found = peft.from_peft(content, load_file(tmp_path / "adapter" / peft_config.WEIGHTS), config, read)
    wanted = their_logits(model)
    assert gap(our_logits(config, tiny_peft.merged(params, found)), wanted) < 1e-5
    assert gap(our_logits(config, params), wanted) > 1e-2


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_peft_loads_the_vectors_of_a_prompt(tmp_path, family):
    """They stand in front of a text, where our model reads them as virtual ids."""
    from peft import PeftModel

    config, params, read = base(tmp_path / "base", family=family)
    prompt_PxD = np.random.default_rng(3).normal(0, 0.5, (6, config.d_model)).astype(np.float32)
    adapter, beside = Adapter(peft.settings("prompt", prompt_tokens=6)), {"prompt": {"embed": {"prompt": prompt_PxD}}}
    given = peft.Adapted(adapter, beside)
    content, tensors = peft.to_peft(given, config, read, (str(tmp_path / "base"), None))
    folder = written(tmp_path / "adapter", content, tensors)
    found = their_logits(PeftModel.from_pretrained(theirs(tmp_path / "base"), folder))
    ids = np.concatenate([np.broadcast_to(config.vocab_size + np.arange(6), (2, 6)), TOKENS], axis=1)
    model = adapter.attach(models.build(config, "xla"))
    hidden = model.apply({"params": params, **beside}, jnp.asarray(ids))
    wanted = np.asarray(hidden @ models.head_kernel(params, config)[:, : config.vocab_size])
    assert gap(found, wanted) < 1e-5
    assert gap(found[:, 6:], their_logits(theirs(tmp_path / "base"))) > 1e-2
    read_back = peft.from_peft(content, load_file(folder / peft_config.WEIGHTS), config, read)
    np.testing.assert_array_equal(read_back.variables["prompt"]["embed"]["prompt"], prompt_PxD)
