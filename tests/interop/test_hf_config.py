"""config.json of transformers 4 and 5 as our keys; what our models can't do is named."""

import json

import pytest
import tiny_models as tiny

from jaxlm.config import ConfigError
from jaxlm.interop import hf_config

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 160,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    "vocab_size": 1000, "hidden_act": "silu", "rms_norm_eps": 1e-5,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 128, "vocab_size": 1000}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def read(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return hf_config.read(tmp_path)[:2]


def test_rotary_settings_of_both_versions(tmp_path):
    wanted = {"rope.theta": 500000.0, "rope.scaling": "llama3", "rope.factor": 8.0, "rope.original_max_len": 8192}
    for config in (
        LLAMA | {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
        LLAMA | {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}},
    ):
        keys, lines = read(tmp_path, config)
        assert {key: keys[key] for key in wanted} == wanted
        assert not lines
    keys, _ = read(tmp_path, LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert (keys["rope.theta"], keys["rope.scaling"], keys["rope.factor"]) == (10000.0, "linear", 2.0)
    assert read(tmp_path, LLAMA)[0]["rope.scaling"] == "none"


NEW = {"rope_theta": 5000.0, "rope_type": "default"}
LINEAR = {"rope_type": "linear", "factor": 2.0}
BOTH = [  # what config.json says, and how many lines it takes to say what is not read
    ({"rope_parameters": NEW, "rope_scaling": LINEAR}, 1),
    ({"rope_parameters": NEW, "rope_scaling": LINEAR, "rope_theta": 7.0}, 1),
    ({"rope_parameters": NEW, "rope_theta": 7000.0}, 1),
    ({"rope_parameters": NEW, "rope_scaling": {}, "rope_theta": 5000.0}, 0),
    ({"rope_parameters": NEW, "rope_scaling": None}, 0),
    ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 7000.0}, 0),
    ({"rope_parameters": LINEAR | {"factor": 4.0}, "rope_scaling": {"type": "linear", "factor": 2.0}}, 1),
    ({"rope_parameters": LINEAR | {"rope_theta": 9.0}, "rope_scaling": LINEAR, "rope_theta": 9.0}, 0),
    ({"rope_scaling": LINEAR | {"rope_theta": 9.0}, "rope_theta": 7.0}, 1),
    ({"rope_scaling": LLAMA3, "rope_theta": 7.0}, 0),
    ({"rope_parameters": {}, "rope_theta": 3.0}, 0),
    ({}, 0),
]


@pytest.mark.parametrize(("rope", "lines"), BOTH)
def test_rotary_settings_that_disagree_are_told(tmp_path, rope, lines):
    keys, _ = read(tmp_path, LLAMA | rope)
    said = hf_config.read(tmp_path)[2]
    assert len(said) == lines
    if said:
        assert said[0].startswith("its rotary settings disagree: ")
        assert f"'theta': {keys['rope.theta']}" in said[0]


@pytest.mark.parity
@pytest.mark.parametrize(("rope", "lines"), BOTH)
def test_rotary_settings_are_those_of_transformers(tmp_path, rope, lines):
    import transformers

    keys, _ = read(tmp_path, LLAMA | rope)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path).rope_parameters
    kind = {"none": "default"}.get(keys["rope.scaling"], keys["rope.scaling"])
    assert (kind, keys["rope.theta"]) == (theirs["rope_type"], theirs["rope_theta"])
    assert keys.get("rope.factor") == theirs.get("factor")


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_rotary_settings_that_are_no_object_are_named(tmp_path, name):
    with pytest.raises(ConfigError, match=rf"config.json is damaged \({name}=\[1\]\): copy it again"):
        read(tmp_path, LLAMA | {"rope_parameters": NEW} | {name: [1]})


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2"])
def test_what_we_write_is_read_back(tmp_path, kind):
    given = {"qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True, "head_dim": 16}, "gpt2": {"family": "gpt2"}}
    c = tiny.model_config(**given.get(kind, {}))
    keys, _ = read(tmp_path, json.loads(json.dumps(hf_config.content(c))))
    assert {key: value for key, value in keys.items() if "." not in key} == {
        k: getattr(c, k) for k in keys if "." not in k
    }
    assert hf_config.read(tmp_path)[2] == []
    assert all(getattr(c.rope, key[5:]) == value for key, value in keys.items() if "." in key)


def test_what_is_left_out_is_as_transformers_has_it(tmp_path):
    bare = {k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "hidden_act", "rms_norm_eps")}
    assert read(tmp_path, bare)[0]["n_kv_heads"] == 4
    assert read(tmp_path, bare)[0]["norm_eps"] == 1e-6
    assert read(tmp_path, LLAMA | {"model_type": "qwen3"})[0]["head_dim"] == 128
    assert read(tmp_path, LLAMA)[0]["head_dim"] == 16
    assert not read(tmp_path, LLAMA)[0]["tie_embeddings"]
    keys, _ = read(tmp_path, GPT2 | {"n_inner": None})
    assert (keys["d_ff"], keys["tie_embeddings"], keys["max_seq_len"]) == (256, True, 128)


def test_a_sliding_window_caps_the_context_and_says_so(tmp_path):
    mistral = LLAMA | {"model_type": "mistral"}
    keys, lines = read(tmp_path, mistral | {"sliding_window": 1024})
    assert keys["max_seq_len"] == 1024
    assert "1,024" in lines[0]
    for config in (mistral | {"sliding_window": None}, mistral | {"sliding_window": 8192}, mistral):
        assert read(tmp_path, config) == (keys | {"max_seq_len": 4096}, [])
    qwen = LLAMA | {"model_type": "qwen2", "sliding_window": 512}
    assert read(tmp_path, qwen)[0]["max_seq_len"] == 4096
    assert read(tmp_path, qwen | {"use_sliding_window": True, "max_window_layers": 1})[0]["max_seq_len"] == 512
    assert read(tmp_path, qwen | {"use_sliding_window": True, "max_window_layers": 2})[0]["max_seq_len"] == 4096


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA | {"model_type": "gemma"},
         "model_type 'gemma' is not supported, only llama, mistral, qwen2, qwen3, gpt2"),
        (LLAMA | {"architectures": ["LlamaForSequenceClassification"]},
         "LlamaForSequenceClassification is not supported"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act=gelu"),
        (LLAMA | {"attention_bias": True}, "attention_bias=True with mlp_bias=False"),
        (LLAMA | {"quantization_config": {"bits": 4}}, "quantised"),
        (LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type=yarn"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, "lacks hidden_size"),
        (GPT2 | {"activation_function": "relu"}, "activation_function=relu"),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
    ],
)  # fmt: skip
def test_what_our_models_do_not_have_is_named(tmp_path, config, message):
    with pytest.raises(ConfigError) as error:
        read(tmp_path, config)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_other_folders_are_no_models(tmp_path):
    assert not hf_config.is_model(tmp_path)
    for content in ("{", "[]", '{"train": {}, "model_type": "llama"}', '{"title": "a site"}'):
        (tmp_path / "config.json").write_text(content)
        assert not hf_config.is_model(tmp_path)


def test_what_no_class_of_transformers_has_is_not_written():
    with pytest.raises(ConfigError, match="QK-norm"):
        hf_config.content(tiny.model_config(qk_norm=True, bias=True))
