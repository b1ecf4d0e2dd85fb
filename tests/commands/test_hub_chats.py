"""Chat models and bases from elsewhere, from the command line: what ends their answers, and a template for those without."""

import json
import shutil

import numpy as np
import pytest
import tiny_hf
from tiny_keys import keys

from jaxlm.cli import cli
from jaxlm.data.chats import chat
from jaxlm.data.tokenizer import coder

pytest.importorskip("tokenizers")
PROMPTS = [{"prompt": f"what is {i}?"} for i in range(20)]
CHATS = [
    {"messages": [{"role": "user", "content": f"what is {i}?"}, {"role": "assistant", "content": "the cat"}]}
    for i in range(20)
]
SCORES = "def flat(prompts, answers, **columns):\n    return [1.0] * len(answers)\n"
BARE = "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + '\n' }}{% endfor %}"
SMALL = keys("""
    train.steps=4 train.batch_size=8 train.seq_len=64 train.eval_every_steps=2 eval.max_examples=8
    sample.prompts=('one',) sample.max_new_tokens=8 runs.supervise=off log.tensorboard=False log.every_steps=1
    data.val_fraction=0.2 replay.share=0
""")
RL = {"train.steps": 2, "rollout.prompts": 2, "rollout.answers": 4, "train.seq_len": 256, "rollout.max_new_tokens": 24}


def command(program, folder, origin, rows, **changed):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = SMALL | {"origin": origin, "data.path": folder / "rows.jsonl", "workdir": folder / "run"}
    given |= {name.replace("__", "."): value for name, value in changed.items()}
    return ["train", program, *(f"--config.{key}={value}" for key, value in given.items())]


def saying(folder, token, **model):
    """Makes the model in a folder say one token for ever, whatever it reads."""
    config, params = tiny_hf.weights(folder, tie_embeddings=False, vocab_size=400, **model)
    state = {name: np.zeros_like(value) for name, value in tiny_hf.params_to_hf(params, config).items()}
    for name, value in state.items():
        value += 1.0 if name.endswith(("embed_tokens.weight", "norm.weight")) else 0.0
    state["lm_head.weight"][token] = 1.0
    tiny_hf.save(folder, state)


def test_a_base_that_is_given_no_template_says_how(tmp_path, capsys):
    tiny_hf.llama3(tmp_path / "base", template="")
    assert cli.main(command("sft", tmp_path, tmp_path / "base", CHATS)) == 2
    assert "has no chat template: give it one by --config.examples.template=chatml" in capsys.readouterr().err


def test_reinforcement_of_answers_that_never_end_is_refused(tmp_path, capsys, monkeypatch):
    (tmp_path / "scores.py").write_text(SCORES)
    monkeypatch.chdir(tmp_path)
    tiny_hf.llama3(tmp_path / "base", template=BARE)
    reward = {"reward__function": "scores:flat"}
    assert cli.main(command("grpo", tmp_path, tmp_path / "base", PROMPTS, **RL, **reward)) == 2
    said = capsys.readouterr().err
    assert "the chat template writes no token after an answer" in said
    assert "grpo would learn from answers that are cut: take a template that ends an answer" in said


@pytest.mark.parity
@pytest.mark.parametrize("piece", ["<|eot_id|>", "<|eom_id|>"])
def test_every_way_out_ends_at_the_same_token(piece, tmp_path, capsys, monkeypatch):
    """Chat, rollouts, samples, an export and transformers on it; the model says nothing but that token."""
    transformers = pytest.importorskip("transformers")
    tiny_hf.llama3(tmp_path / "model")
    saying(tmp_path / "model", tiny_hf.LLAMA3.index(piece))
    assert cli.main(["chat", str(tmp_path / "model"), "--message=hi"]) == 0
    assert "the answer is empty" in "".join(capsys.readouterr())
    (tmp_path / "scores.py").write_text(SCORES)
    monkeypatch.chdir(tmp_path)
    given = RL | {"reward__function": "scores:flat", "optim__lr": 1e-9}
    assert cli.main(command("grpo", tmp_path, tmp_path / "model", PROMPTS, **given)) == 0
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert {row["train/truncated"] for row in rows if "train/truncated" in row} == {0.0}
    assert {row["samples/ended"] for row in rows if "samples/ended" in row} == {1.0}
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        (tmp_path / "run/tokenizer" / name).unlink(missing_ok=True)
    shutil.rmtree(tmp_path / "model")
    assert chat.ends(coder.load(tmp_path / "run/tokenizer")) == (3, 0, 4)  # they stand in the run alone
    assert cli.main(["export", str(tmp_path / "run"), "--to=hf", f"--out={tmp_path}/out"]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert theirs.generation_config.eos_token_id == [3, 0, 4]
    import torch

    assert len(theirs.generate(torch.tensor([[5, 6]]), max_new_tokens=9, do_sample=False)[0]) == 3


@pytest.mark.parity
def test_a_base_learns_chatml_and_transformers_answers_alike(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    tiny_hf.byte_level(tmp_path / "base", controls=("<|endoftext|>",))
    ids = coder.load(tmp_path / "base").vocab_size
    tiny_hf.weights(tmp_path / "base", vocab_size=ids, tie_embeddings=False)
    given = {"examples__template": "chatml", "train__steps": 30, "optim__lr": 1e-2, "model__dtype": "float32"}
    assert cli.main(command("sft", tmp_path, tmp_path / "base", CHATS, **given)) == 0
    said = "".join(capsys.readouterr())
    assert "has no chat tokens: its tokenizer, embedding and head get the 2 of ChatML" in said
    assert "an answer ends with <|im_end|> or <|endoftext|>" in said
    (tmp_path / "base/chat_template.jinja").write_text(BARE)
    assert cli.main(command("sft", tmp_path, tmp_path / "base", CHATS, **given | {"train__steps": 31})) == 0  # goes on
    (tmp_path / "own.jinja").write_text(BARE)
    given |= {"train__steps": 32, "examples__template": tmp_path / "own.jinja"}
    capsys.readouterr()
    assert cli.main(command("sft", tmp_path, tmp_path / "base", CHATS, **given)) == 0
    assert "the run keeps the chat template that it began with, in " in "".join(capsys.readouterr())
    shutil.move(tmp_path / "base", tmp_path / "elsewhere")
    given |= {"train__steps": 33, "examples__template": tmp_path / "gone.jinja"}
    assert cli.main(command("sft", tmp_path, tmp_path / "base", CHATS, **given)) == 0
    capsys.readouterr()
    assert cli.main(["chat", str(tmp_path / "run"), "--message=what is 3?", "--config.sample.temperature=0"]) == 0
    ours = capsys.readouterr().out.strip()
    assert ours == "the cat"
    assert cli.main(["export", str(tmp_path / "run"), "--to=hf", f"--out={tmp_path}/out", "--dtype=f32"]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    asked = [{"role": "user", "content": "what is 3?"}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**ids, max_new_tokens=20, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert tokenizer.decode(out) == f"{ours}<|im_end|>"
