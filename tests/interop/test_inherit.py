"""What a config takes over from its origin: the model and the tokenizer, and what can't go with them is refused."""

import json
import pathlib
import shutil

import pytest
import tiny_data
import tiny_hf

from jaxlm import config
from jaxlm.cli import cli
from jaxlm.config import ConfigError, config_files
from jaxlm.data.chats import chat
from jaxlm.data.tokenizer import coder
from jaxlm.interop import inherit

pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny Qwen3 in a folder, with room for more ids than its tokenizer has."""
    folder = tmp_path_factory.mktemp("qwen")
    tiny_hf.weights(folder, qk_norm=True, head_dim=16, vocab_size=450, rope_theta=1e6, max_seq_len=2048)
    tiny_hf.byte_level(folder)
    return folder


def taken(*overrides, name="base"):
    lines = []
    c = config_files.load(name, overrides)
    inherit.take(c, overrides, lines.append)
    return config.resolve(c), lines


def test_model_and_tokenizer_come_from_the_origin(model):
    c, lines = taken(f"origin={model}", "data.path=x", "workdir=w", "train.steps=50", "model.dropout=0.1")
    m = c.model
    assert (m.n_layers, m.d_model, m.qk_norm, m.head_dim, m.vocab_size, m.rope.theta) == (2, 32, True, 16, 450, 1e6)
    assert (m.dropout, m.max_seq_len, c.data.tokenizer) == (0.1, 2048, str(model))
    assert c.optim.warmup_steps == 5
    assert c.data.chat_tokens
    assert len(lines) == 2
    assert "2 layers of d 32" in lines[1]
    # A shipped config's own model gives way; without an origin nothing happens.
    assert taken(f"origin={model}", "data.path=x", name="quickstart")[0].model.d_model == 32
    assert taken("data.path=x", "workdir=w") == (
        config.resolve(config_files.load("base", ["data.path=x", "workdir=w"])),
        [],
    )


def test_a_chat_template_alone_makes_no_chat_tokens(model, tmp_path):
    """Its text may name tokens that the vocabulary lacks."""
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace("<|im_start|>", "<|other|>"))
    (tmp_path / "chat_template.jinja").write_text("{{ '<|im_start|>' }}")
    assert not taken(f"origin={tmp_path}", "data.path=x", "workdir=w")[0].data.chat_tokens


def test_what_may_change_and_what_may_not(model):
    given = f"origin={model}", "data.path=x", "workdir=w"
    c, _ = taken(*given, "model.rope.theta=5e6", "model.max_seq_len=4096", "model.n_layers=2", "model.n_kv_heads=0")
    assert (c.model.rope.theta, c.model.max_seq_len, c.model.n_kv_heads) == (5e6, 4096, 2)
    for override, message in (
        ("model.n_layers=4", "config.model.n_layers=4, but the origin's model has 2"),
        ("model.vocab_size=400", "has 450"),
        ("model.qk_norm=False", "has True"),
        ("phases.shrink=cpu", "phases.shrink"),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            taken(*given, override)
        assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="no folder nowhere"):
        taken("origin=nowhere", "data.path=x")


def test_a_window_ends_the_context(model, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    saved = json.loads((model / "config.json").read_text())
    mistral = saved | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 128}
    (tmp_path / "config.json").write_text(json.dumps(mistral))
    c, lines = taken(f"origin={tmp_path}", "data.path=x", "workdir=w")
    assert (c.model.max_seq_len, c.train.seq_len) == (128, 128)
    assert "sliding window" in lines[0]
    with pytest.raises(ConfigError, match="context ends at 128"):
        taken(f"origin={tmp_path}", "data.path=x", "workdir=w", "train.seq_len=256")


def test_a_run_is_an_origin_too_and_data_of_another_tokenizer_is_refused(model, tmp_path):
    data = tiny_data.make(tmp_path / "run/data", {"a": 1.0})
    sizes = ["model.n_layers=2", "model.d_model=48", "model.n_heads=4", "model.vocab_size=300", "train.seq_len=64"]
    run = config.resolve(config_files.load("base", [f"workdir={tmp_path / 'run'}", f"data.dir={data.path}", *sizes]))
    (tmp_path / "run/config.json").write_text(config.to_json(run))
    c, _ = taken(f"origin={tmp_path / 'run'}", "data.path=x", "workdir=w")
    assert (c.model.d_model, c.model.vocab_size, c.data.tokenizer) == (48, 300, str(data.path))
    taken(f"origin={tmp_path / 'run'}", f"data.dir={data.path}")
    with pytest.raises(ConfigError, match="was made with another tokenizer than that of"):
        taken(f"origin={model}", f"data.dir={data.path}")
    with pytest.raises(ConfigError, match="is not the model's own"):
        taken(f"origin={model}", "data.path=x", f"data.tokenizer={data.path}")


def a_run(folder, *overrides, chat_tokens=False):
    """A run without a checkpoint: what a config takes from one needs no more."""
    data = tiny_data.make(folder / "data", {"a": 1.0})
    sizes = ["model.n_layers=2", "model.d_model=48", "model.n_heads=4", "train.seq_len=64"]
    ids = f"model.vocab_size={305 if chat_tokens else 300}"
    if chat_tokens:
        coder.write(chat.grown(data.tokenizer()), folder / "tokenizer")
    saved = config_files.load("base", [f"workdir={folder}", f"data.dir={data.path}", ids, *sizes, *overrides])
    (folder / "config.json").write_text(config.to_json(config.resolve(saved)))
    return folder


def test_a_base_of_ours_without_chat_tokens_gets_five(tmp_path, model):
    run = a_run(tmp_path / "run")
    c, lines = taken(f"origin={run}", "data.path=x", "workdir=w", name="sft")
    assert (c.model.vocab_size, c.data.chat_tokens, c.train.seq_len, c.model.max_seq_len) == (305, True, 64, 64)
    assert any("has no chat tokens" in line for line in lines)
    assert any("train.seq_len=64" in line for line in lines)
    assert taken(f"origin={run}", "data.path=x", "workdir=w")[0].model.vocab_size == 300  # pretraining asks for none
    chats = a_run(tmp_path / "chats", chat_tokens=True)
    c, lines = taken(f"origin={chats}", "data.path=x", "workdir=w", name="sft")
    assert (c.model.vocab_size, c.data.tokenizer) == (305, str(chats / "tokenizer"))
    assert not any("has no chat tokens" in line for line in lines)
    assert taken(f"origin={model}", "data.path=x", "workdir=w", name="sft")[0].model.vocab_size == 450


def test_an_adapter_is_merged_or_taken_over(tmp_path):
    kind = ("program=sft", "origin=base", "adapter.kind=lora", "adapter.rank=3", "adapter.dropout=0.2")
    given = f"origin={a_run(tmp_path / 'lora', *kind, chat_tokens=True)}", "data.path=x", "workdir=w"
    assert taken(*given, name="sft")[0].adapter.kind == "none"
    on = (*given, "origin_merge=False")
    a = taken(*on, "adapter.dropout=0.1", name="sft")[0].adapter
    assert (a.kind, a.rank, a.dropout) == ("lora", 3, 0.1)
    with pytest.raises(ConfigError, match=r"config.adapter.rank=4, but the origin's has 3"):
        taken(*on, "adapter.rank=4", name="sft")
    prompt = f"origin={a_run(tmp_path / 'prompt', *kind, 'adapter.kind=prompt', chat_tokens=True)}", *given[1:]
    with pytest.raises(ConfigError, match="can't be merged into its model: begin with its own origin, base"):
        taken(*prompt, name="sft")
    assert taken(*prompt, "origin_merge=False", name="sft")[0].adapter.kind == "prompt"


def test_an_adapter_needs_its_base(tmp_path):
    run = a_run(tmp_path / "lora", "program=sft", "origin=/gone/base", "adapter.kind=lora", chat_tokens=True)
    with pytest.raises(ConfigError, match="holds an adapter alone, which needs its base"):
        taken("origin=/gone/base", "data.path=x", f"workdir={run}", name="sft")


def test_the_run_stands_alone_when_its_origin_is_gone(model, tmp_path):
    origin, run = tmp_path / "model", tmp_path / "run"
    origin.mkdir()
    for file in model.iterdir():
        (origin / file.name).write_bytes(file.read_bytes())
    given = f"origin={origin}", "data.path=x", f"workdir={run}"
    c, _ = taken(*given)
    (run / "data").mkdir(parents=True)
    (run / "config.json").write_text(config.to_json(c))
    (run / "data/tokenizer.json").write_bytes((origin / "tokenizer.json").read_bytes())
    (run / "data/tokenizer_ids.json").write_text('{"eos_id": 0, "bos_id": null, "opening": []}')
    for file in origin.iterdir():
        file.unlink()
    pathlib.Path(origin).rmdir()
    again, _ = taken(*given)
    assert again.model == c.model
    assert again.data.tokenizer == str(run / "data")


def test_the_config_of_a_model_itself(model, tmp_path):
    c = config.resolve(inherit.of_model(str(model), ["sample.temperature=0"]))
    assert (c.workdir, c.model.d_model, c.sample.temperature) == (str(model), 32, 0.0)
    for word in ("", "nowhere", str(tmp_path)):
        with pytest.raises(ConfigError, match="takes the folder of a Hugging Face model"):
            inherit.of_model(word, [])


def test_a_folder_of_a_start_that_saved_nothing_says_nothing_of_ties(tmp_path):
    """Its config.json may be of another origin: a head of its own is read all the same."""
    tiny_hf.byte_level(tmp_path / "model")
    tiny_hf.weights(tmp_path / "model", tie_embeddings=False, vocab_size=400)
    content = json.loads((tmp_path / "model/config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "model/config.json").write_text(json.dumps(content))
    tied = config.resolve(config_files.load("base", [f"workdir={tmp_path / 'run'}"]))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text(config.to_json(tied))
    said = []
    made = config_files.load("sft", [f"workdir={tmp_path / 'run'}", f"origin={tmp_path / 'model'}", "data.path=x"])
    inherit.take(made, [], said.append)
    assert not made.model.tie_embeddings
    assert any("differs from the embedding: the head is used" in line for line in said)


@pytest.mark.parametrize("verb", ["chat", "eval", "import"])
def test_a_verb_on_a_folder_says_what_contradicts_itself_in_it(model, tmp_path, capsys, verb):
    """Once, as a start that begins with it does; an adapter's base counts as well."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    shutil.copytree(model, base)
    stored = json.loads((base / "tokenizer.json").read_text())
    (base / "tokenizer.json").write_text(json.dumps(stored | {"model": stored["model"] | {"dropout": 0.1}}))
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").touch()
    (adapter / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2, "base_model_name_or_path": str(base)})
    )
    for folder in (base, adapter):
        cli._settled(verb, str(folder), [], pytest.fail)
        assert capsys.readouterr().err.count("has a BPE dropout of 0.1: it is off") == 1
    cli._settled(verb, str(model), [], pytest.fail)
    assert capsys.readouterr().err == ""
