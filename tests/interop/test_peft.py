"""Adapters in PEFT's files: back to the bit, checked against a reader of their own, and refused by name."""

import dataclasses
import json

import numpy as np
import pytest
import tiny_hf
import tiny_models as tiny
import tiny_peft
from interop import reader
from safetensors.numpy import save_file

from jaxlm import models
from jaxlm.config import ConfigError
from jaxlm.devices import tree
from jaxlm.interop import card, hf_config, leaves, peft, peft_config
from jaxlm.models.adapters import Adapter
from jaxlm.train import origin

IDS = (3, 96, 97)
TOKENS = np.random.default_rng(0).integers(0, 101, (1, 24))


def random_base(**keys):
    """(config, parameters, how their leaves are read)."""
    config = tiny.model_config(**keys)
    params = tiny.random_params(models.build(config, "xla"))
    return config, params, {name: np.asarray(leaf) for name, leaf in tree.named_leaves(params)}.__getitem__


def made(ids=IDS, targets=tiny_peft.EVERY, **keys):
    """(config, how the base's leaves are read, an adapter)."""
    config, params, read = random_base(**keys)
    return config, read, tiny_peft.adapted(params, ids, targets=targets)


@pytest.mark.parametrize("keys", [{}, {"tie_embeddings": False}, {"family": "gpt2"}], ids=str)
def test_what_is_written_is_read_back(keys):
    config, read, given = made(**keys)
    content, tensors = peft.to_peft(given, config, read, ("b", None))
    peft_config.check(content)
    found = peft.from_peft(content, tensors, config, read)
    assert found.adapter.row_ids == IDS
    assert found.adapter.settings.scale == given.adapter.settings.scale
    np.testing.assert_array_equal(*(tree.named_leaves(x.variables["lora"])[0][1] for x in (found, given)))
    for (name, a), (other, b) in zip(*(tree.named_leaves(x.variables) for x in (found, given)), strict=True):
        assert name == other
        np.testing.assert_allclose(a, b, atol=1e-6 if name.startswith("rows") else 0)  # rows are added to the base's


MISTAKES = {
    "alpha": lambda content, tensors: content.update(lora_alpha=7.0),
    "rslora": lambda content, tensors: content.update(use_rslora=True),
    "an id": lambda content, tensors: content["trainable_token_indices"].update(embed_tokens=[4, 96, 97]),
    "a factor": lambda content, tensors: tensors.update(
        {name: -value for name, value in tensors.items() if "layers.1.mlp.up_proj.lora_B" in name}
    ),
}


def logits_of(config, read, content, tensors, prompt_PxD=None):
    """What an adapter's files give on their base, by a reader of its own: our own reading would undo a mistake of ours."""
    base = {
        tensor.name: tensor.from_leaves([read(leaf) for leaf in tensor.leaves]) for tensor in leaves.tensors(config)
    }
    adapted = {name: reader.adapted(content, tensors, name, value) for name, value in base.items()}
    return reader.of_hf(hf_config.content(config)).logits(adapted, TOKENS, prompt_PxD)


def gap(a, b) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


def test_a_mistake_is_found():
    config, params, read = random_base()
    given = tiny_peft.adapted(params, IDS)
    model = models.build(config, "xla")
    wanted = np.asarray(tiny.jit(lambda p: tiny.logits(model, p, TOKENS))(tiny_peft.merged(params, given)))
    assert gap(logits_of(config, read, *peft.to_peft(given, config, read, ("b", None))), wanted) < 1e-5
    for name, mistake in MISTAKES.items():
        content, tensors = peft.to_peft(given, config, read, ("b", None))
        mistake(content, tensors)
        assert gap(logits_of(config, read, content, tensors), wanted) > 1e-3, name


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_vectors_of_a_prompt(family):
    config, params, read = random_base(family=family)
    prompt_PxD = np.random.default_rng(0).normal(0, 1, (5, 32)).astype(np.float32)
    adapter, beside = Adapter(peft.settings("prompt", prompt_tokens=5)), {"prompt": {"embed": {"prompt": prompt_PxD}}}
    content, tensors = peft.to_peft(peft.Adapted(adapter, beside), config, read, ("b", None))
    ids = np.concatenate([config.vocab_size + np.arange(5)[None], TOKENS], axis=1)
    model = adapter.attach(models.build(config, "xla"))
    hidden = tiny.jit(lambda variables: model.apply(variables, ids))({"params": params, **beside})
    wanted = np.asarray(hidden @ models.head_kernel(params, config)[:, : config.vocab_size])
    assert gap(logits_of(config, read, content, tensors, tensors["prompt_embeddings"]), wanted) < 1e-5
    assert gap(logits_of(config, read, content, tensors, tensors["prompt_embeddings"][::-1]), wanted) > 1e-2


def test_the_card_says_that_a_base_was_in_codes():
    """Its files are right, yet who loads them has another base."""
    base = card.Base("base", 3, 0, "nf4")
    facts = card.Facts(
        "r", "peft", tiny.model_config(), 1, 9, {"step": 0}, (), {}, "", {}, (), False, "AutoTokenizer", base=base
    )
    assert "Its layers were in nf4 in training; in full precision" in card.text(facts)
    plain = dataclasses.replace(facts, base=card.Base("base", 3, 0, "none"))
    assert "full precision" not in card.text(plain)
    assert "the data was not at hand" in card.text(plain)
    assistant = dataclasses.replace(plain, examples=("chats.jsonl",), origin="first")
    assert "Trained from first by the examples of chats.jsonl; the card of first names the data" in card.text(assistant)
    assert "Trained from first by rewards;" in card.text(dataclasses.replace(assistant, examples=()))


def written(folder, content, tensors):
    folder.mkdir()
    (folder / peft_config.CONFIG).write_text(json.dumps(content))
    save_file(tensors, folder / peft_config.WEIGHTS)
    return folder


@pytest.fixture
def folder(tmp_path):
    """An adapter beside its base, with the base's parameters and the adapter."""
    config, params = tiny_hf.weights(tmp_path / "base", vocab_size=400)
    tiny_hf.byte_level(tmp_path / "base")
    given = tiny_peft.adapted(params, (1, 2))
    read = {name: np.asarray(leaf) for name, leaf in tree.named_leaves(params)}.__getitem__
    place = written(tmp_path / "adapter", *peft.to_peft(given, config, read, (str(tmp_path / "base"), None)))
    return place, params, given


def test_a_folder_is_opened_with_its_base(folder):
    place, params, given = folder
    merged, apart = (origin.open(place, readers=peft.READERS, merge=merge) for merge in (True, False))
    wanted = dict(tree.named_leaves(tiny_peft.merged(params, given)))
    for name in ("layers_1/attn/o/kernel", "embed/embedding"):
        real = slice(400) if name.startswith("embed") else slice(None)  # the padding of the vocabulary is 0 in files
        np.testing.assert_allclose(merged.leaf(name)[real], wanted[name][real], atol=1e-6)
        np.testing.assert_array_equal(apart.leaf(name)[real], dict(tree.named_leaves(params))[name][real])
    assert merged.adapter is None
    assert merged.trained() == {}
    assert apart.adapter.row_ids == (1, 2)
    assert apart.trained().keys() == {"lora", "rows"}
    assert len({merged.digest(), apart.digest()}) == 2


def test_a_base_that_was_moved_with_its_adapter_is_found_and_one_that_is_gone_is_told(folder, tmp_path):
    place, _, _ = folder
    moved = tmp_path / "moved"
    moved.mkdir()
    (tmp_path / "base").rename(moved / "base")
    with pytest.raises(ConfigError, match="no folder here: copy that model here") as error:
        origin.open(place, readers=peft.READERS)
    assert "\n" not in str(error.value)
    place.rename(moved / "adapter")
    assert origin.open(moved / "adapter", readers=peft.READERS).adapter is None


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("peft_type", "IA3", "only LORA and PROMPT_TUNING"),
        ("use_dora", True, "use_dora=True is not supported: merge the adapter"),
        ("modules_to_save", ["lm_head"], "modules_to_save"),
        ("init_lora_weights", "pissa", "init_lora_weights=pissa"),
    ],
)
def test_what_is_not_done_here_is_named(folder, key, value, words):
    place, _, _ = folder
    content = json.loads((place / peft_config.CONFIG).read_text()) | {key: value}
    (place / peft_config.CONFIG).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=words) as error:
        origin.open(place, readers=peft.READERS)
    assert "\n" not in str(error.value)


def test_an_adapter_for_another_model_is_refused(folder):
    place, _, _ = folder
    config = tiny.model_config(vocab_size=400, d_ff=64)
    wide = tiny_peft.adapted(tiny.random_params(models.build(config, "xla")), targets=(r"mlp/up",))
    tensors = peft.to_peft(wide, config, lambda leaf: None, ("", None))[1]
    save_file(tensors, place / peft_config.WEIGHTS)
    with pytest.raises(ConfigError, match="they do not belong together"):
        origin.open(place, readers=peft.READERS)
    save_file(
        {"model.layers.9.self_attn.q_proj.lora_A.weight": np.ones((3, 32), np.float32)}, place / peft_config.WEIGHTS
    )
    with pytest.raises(ConfigError, match="can't be loaded"):
        origin.open(place, readers=peft.READERS)


@pytest.mark.parametrize(("tie", "module"), [(True, "lm_head"), (False, "model.embed_tokens")])
def test_factors_of_head_or_embedding_are_refused_in_a_line(tmp_path, tie, module):
    config = tiny.model_config(tie_embeddings=tie)
    params = tiny.random_params(models.build(config, "xla"))
    read = dict(tree.named_leaves(params)).__getitem__
    content, tensors = peft.to_peft(tiny_peft.adapted(params), config, read, ("", None))
    a, b = np.ones((3, config.d_model), np.float32), np.ones((config.vocab_size, 3), np.float32)
    tensors |= {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}
    with pytest.raises(
        ConfigError, match=f"adapter's {module}.lora_A.weight can't be loaded.*merge_and_unload"
    ) as error:
        peft.from_peft(content, tensors, config, read)
    assert "\n" not in str(error.value)


def test_settings_to_train_on_with(folder):
    place, _, given = folder
    found = peft_config.settings(place, {"<|im_start|>": 1, "<|im_end|>": 2})
    chosen = dataclasses.asdict(given.adapter.settings)
    assert {key: found[key] for key in ("kind", "rank", "alpha", "rslora")} == {
        key: chosen[key] for key in ("kind", "rank", "alpha", "rslora")
    }
    assert found["rows"] == ("<|im_start|>", "<|im_end|>")
    assert set(found["targets"]) == {*(f"attn/{x}" for x in "qkvo"), *(f"mlp/{x}" for x in ("gate", "up", "down"))}
    with pytest.raises(ConfigError, match="row of id 2, which is no control token"):
        peft_config.settings(place, {"<|im_start|>": 1})
