"""`jaxlm export` as its user meets it: a run's checkpoint in, a folder out, one line for what can't be."""

import dataclasses
import functools
import json
import re
import shlex
import shutil
import types

import pytest
import tiny_data
import tiny_hub
import tiny_models as tiny
import yaml

from jaxlm import config, models
from jaxlm.cli import cli
from jaxlm.commands import chat, export, export_facts
from jaxlm.config import config_files
from jaxlm.data.tokenizer import coder
from jaxlm.eval import results
from jaxlm.interop import card
from jaxlm.run import ledger, receipt
from jaxlm.run.checkpoints import meta, saving
from jaxlm.run.workdir import TOKENIZER
from jaxlm.train import origin


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with weights as its checkpoint, a tokenizer, data and the results of a benchmark."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    folder.mkdir()
    data = tiny_data.make(folder / "data", {"a": 1.0, "b": 3.0})
    keys = [f"model.{name}={value}" for name, value in (tiny.BASE | {"vocab_size": 300}).items()]
    c = config.resolve(config_files.load("base", [f"workdir={folder}", f"data.dir={data.path}", *keys]))
    (folder / "config.json").write_text(config.to_json(c))
    model = models.build(c.model, "xla")
    saving.save_weights(folder / "checkpoints", lambda: tiny.random_params(model), dataclasses.asdict(c))
    coder.write(data.tokenizer(), folder / TOKENIZER)
    scored = results.TaskResult("arc_easy", {"acc": 0.41}, {"acc": 0.01}, 0.25, 5, [results.Item("1", {"acc": 1.0})])
    results.write(folder, [scored], {"step": 0})
    losses = {"val/loss": 2.5, "val/a/loss": 2.25, "val/a/bits_per_byte": 1.125, "val/text_loss": 9.0}
    lines = [{"step": 0, "time": 1.0, **losses}, {"step": 9, "time": 2.0, "val/loss": 1.0}]  # of a later checkpoint
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "samples").mkdir()
    for step in (0, 9):
        texts = {0.0: f" the likeliest at {step}", 0.8: f" drawn\n at {step} " + "and on " * 60}
        lines = [{"step": step, "prompt": "Once", "temperature": t, "text": text} for t, text in texts.items()]
        (folder / f"samples/{step}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_run_is_exported_with_its_card(run, tmp_path, capsys):
    out, links = tmp_path / "out", [{"step": 0, "sha256": "5e"}]
    ledger.put(run, "receipt", links)
    assert cli.main(["export", str(run), "--to=hf", f"--out={out}", "--json"]) == 0
    assert json.loads((out / "receipt.json").read_bytes()) == {"proves": receipt.PROVES, "links": links}
    ledger.put(run, "receipt", [])
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["path"] == str(out)
    assert said["dtype"] == "bf16"
    names = {path.name for path in out.iterdir()}
    assert "receipt.json" in json.loads((out / "jaxlm_export.json").read_bytes())["sha256"]
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "README.md"} <= names
    card = (out / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert (front["library_name"], front["pipeline_tag"]) == ("transformers", "text-generation")
    assert front["tags"] == ["jaxlm", "llama"]
    assert "| arc_easy | acc | 0.410 ± 0.020 | 0.250 | 5 | 1 |" in card
    assert "| b | test:b | 75.0% |" in card
    assert "look it up before you publish" in card
    assert "At step 0, on text that was held out" in card
    rows = re.search(r"bits per byte \|\n.*\n((\|.*\n)+)", card)[1]
    assert rows == "| all | 2.5000 |  |\n| a | 2.2500 | 1.1250 |\n"
    assert "At step 0, at temperature 0.8; prompts in brackets, cut after 300 characters." in card
    sample = re.search(r"\n\n(    \[Once\] drawn at 0 and on(.|\n)*?)\n\n", card)[1]
    assert len("".join(row[4:] for row in sample.splitlines())) in (297, 298, 299, 300)
    flags = ["--to=gguf", f"--out={tmp_path / 'gguf'}", "--dtype=q8_0,f16"]
    assert cli.main(["export", str(run), *flags, "--json"]) == 0
    bits = json.loads(capsys.readouterr().out)["bits_per_byte"]
    assert bits.keys() == {"run", "q8_0"}
    assert 0 < abs(bits["q8_0"] - bits["run"]) < 0.01 * bits["run"]
    card = (tmp_path / "gguf/README.md").read_text()
    assert f"- mine-q8_0.gguf loses {bits['q8_0'] - bits['run']:.4f} bits per byte of held-out text" in card
    assert "    ollama create mine -f Modelfile  # untried" in card
    assert 'llama-completion -m mine-q8_0.gguf -no-cnv -p "Once upon a time"' in card
    assert (tmp_path / "gguf" / "mine-q8_0.gguf").is_file()


def test_what_a_file_loses_is_not_measured_where_the_model_does_not_fit(run, monkeypatch, capsys):
    c, file = config.resolve(config_files.of_run(run, [])), types.SimpleNamespace(dtype="q8_0")
    monkeypatch.setattr(export_facts.model, "restore", None)
    monkeypatch.setattr(export_facts.lower, "available_bytes", lambda: 1e5)
    assert export_facts.measured(c, 0, [file]) == {}
    assert "what the files lose is not measured: it takes " in capsys.readouterr().err


def test_a_checkpoint_that_is_rotated_away_meanwhile_is_not_measured(run):
    """A run may go on training while it is exported: its latest checkpoint is then another one."""
    c, file = config.resolve(config_files.of_run(run, [])), types.SimpleNamespace(dtype="q8_0")
    assert export_facts.measured(c, 7, [file]) == {}


def test_an_average_is_exported_under_its_runs_name(run):
    (average := run / "average").mkdir()
    name = lambda folder: export._name(types.SimpleNamespace(workdir=str(folder)))  # noqa: E731
    assert (name(run), name(average)) == ("mine", "mine-average")
    average.rmdir()


def test_it_ends_with_what_reads_the_folder_and_what_uploads_it(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["export", str(run), "--to=hf", "--out=my out"]) == 0
    upload, uses = capsys.readouterr().err.splitlines()[-2:]
    assert upload == "to the hub: the same with --push=YOU/mine (docs/export.md)"
    assert uses == "next: jaxlm sample 'my out' \"The\""
    assert cli.main([*shlex.split(uses)[2:], "--max-new-tokens=2"]) == 0
    c, source = (
        config.resolve(config_files.of_run(run, [])),
        types.SimpleNamespace(tokenizer=None, base=("runs/b", "7")),
    )
    monkeypatch.setattr(export.chat, "speaks", lambda tokenizer: True)
    of = functools.partial(export._next, c, out="o", place=tmp_path / "mine-f16.gguf", source=source, base=None)
    assert of(to="hf") == "jaxlm chat o"
    assert of(to="gguf") == "llama-cli -m o/mine-f16.gguf"  # which only chats
    assert of(to="peft", base=card.Base("b", 7, 0, "none")) == (
        "jaxlm export runs/b --checkpoint=7 --to=hf --out=o-base, then as in o/README.md"
    )
    assert of(to="peft", base=card.Base("b", None, 0, "none")) == "jaxlm chat o"
    assert of(to="peft", base=card.Base("b", None, 300, "none")) == "o/README.md shows how to load it"
    reward = functools.partial(of.func, dataclasses.replace(c, program="reward"), **of.keywords)
    assert reward(to="hf") == "o/README.md shows how to load it"


def test_the_card_tells_of_a_final_mixture_if_the_checkpoint_has_seen_it(run):
    keys = ["train.steps=1000", "data.final.share=0.2", "data.final.weights.a=1", "data.final.weights.b=1"]
    c = config.resolve(config_files.of_run(run, keys))
    for step in (0, 800):
        assert export_facts._sources(c, step)[1] == ""
    sources, mixture = export_facts._sources(c, 801)
    assert mixture == "b 0.75, a 0.25 to step 800, then a 0.5, b 0.5"
    assert sources["b"]["share"] == 0.75  # of the first
    facts = export_facts.gather(c, origin.open(str(run)).tokenizer(), 801, "mine", 1)
    assert f"The mixture changed: {mixture}." in card.text(facts)


def test_what_cant_be_is_one_line(run, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    given = {
        f"--out={tmp_path / 'full'}": (2, "not empty"),
        f"--out={tmp_path / 'a'} --dtype=int4": (2, "--to=hf writes bf16, f16, f32"),
        f"--out={tmp_path / 'a'} --dtype=q4_k_m": (2, "--to=hf writes bf16, f16, f32; give --to=gguf for q4_k_m"),
        f"--out={tmp_path / 'a'} --checkpoint=7": (2, "no checkpoint '7'"),
    }
    for flags, (code, words) in given.items():
        assert cli.main(["export", str(run), "--to=hf", *flags.split()]) == code
        said = capsys.readouterr().err.strip()
        assert words in said
        assert "\n" not in said
    assert cli.main(["export", str(tmp_path), "--to=hf", f"--out={tmp_path / 'a'}"]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]


def test_a_damaged_checkpoint_is_not_exported(run, tmp_path, capsys):
    broken = tmp_path / "broken"
    shutil.copytree(run, broken)
    files = (path for path in (broken / "checkpoints/0/params").rglob("*") if path.is_file())
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    assert cli.main(["export", str(broken), "--to=hf", f"--out={tmp_path / 'out'}"]) == 1
    assert "damaged" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


BETTER = "step 0 is the best by val/reward, and this is the latest, 2: --checkpoint=best takes it"


@pytest.mark.parametrize(
    ("program", "rewards", "said"),
    [
        ("grpo", {0: 0.9, 2: 0.4}, BETTER),
        ("ppo", {0: 0.9}, BETTER),
        ("grpo", {0: 0.4, 2: 0.9}, ""),
        ("grpo", {}, ""),
        ("pretrain", {0: 0.9, 2: 0.4}, ""),
    ],
)
def test_a_latest_checkpoint_that_is_not_the_best_is_told(run, tmp_path, capsys, program, rewards, said):
    """By export and by chat, unless another checkpoint than the latest is asked for."""
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    shutil.copytree(folder / "checkpoints/0", folder / "checkpoints/2")
    file = folder / "checkpoints/2/meta/metadata"
    saved = json.loads(file.read_text())
    file.write_text(json.dumps(meta.sealed({"config": saved["config"]}, 2, saved["digests"])))
    (folder / "checkpoints/2/checksums.json").unlink()
    content = json.loads((folder / "config.json").read_text()) | {"program": program}
    content["checkpoint"] |= {"best_metric": "val/reward", "best_is": "highest"}
    (folder / "config.json").write_text(json.dumps(content))
    lines = [json.dumps({"step": step, "time": 1.0, "val/reward": reward}) + "\n" for step, reward in rewards.items()]
    (folder / "metrics.jsonl").write_text("".join(lines))
    saved = config.resolve(config_files.of_run(folder, []))
    assert origin.better(saved, "latest") == said
    assert origin.better(saved, "2") == origin.better(saved, "best") == ""
    if program == "grpo" and said:
        chat._restored(saved, "latest", False, [])
        assert cli.main(["export", str(folder), "--to=hf", f"--out={tmp_path / 'out'}"]) == 0
        assert capsys.readouterr().err.count(said) == 2


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub for `huggingface_hub`, a token in the environment, and an empty folder to work in."""
    from huggingface_hub import constants

    monkeypatch.chdir(tmp_path)
    with tiny_hub.started() as made:
        monkeypatch.setattr(constants, "ENDPOINT", made.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # a benchmark of an earlier test may have set it
        monkeypatch.setenv("HF_TOKEN", tiny_hub.TOKEN)
        yield made


def test_an_export_goes_to_a_private_repository_and_on_after_a_cut(run, hub, tmp_path, capsys):
    push = ["export", str(run), "--dtype=bf16,f16,f32", "--push=me/it"]
    hub.most = 1
    assert cli.main(push) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert "--push=me/it: " in said
    assert said.endswith("run it again: files that are there are not sent twice")
    assert hub.repos["me/it"] == {"private": True, "files": {}}
    (first,), hub.most, hub.puts[:] = hub.stored, 1000, []
    assert cli.main(push) == 0
    assert first not in hub.puts
    assert len(hub.puts) == len({*hub.puts}) == 2
    files = hub.repos["me/it"]["files"]
    folder = tmp_path / "exports/mine"
    assert files == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {"model.safetensors", "mine-f16.gguf", "mine-f32.gguf", "tokenizer.json", "README.md", "Modelfile"} < {
        *files
    }
    said = capsys.readouterr()
    assert f"on the hub: {hub.url}/me/it/" in said.err
    hub.puts.clear()
    older = {"model-00001-of-00002.safetensors": b"older", "model.safetensors.index.json": b"{}"}
    files |= older | {"notes.txt": b"mine"}
    assert cli.main([*push, "--json"]) == 0  # nothing changed: no large file is sent
    assert hub.puts == []
    assert "notes.txt" in files
    assert not older.keys() & files  # transformers would load them
    assert json.loads(capsys.readouterr().out)["pushed"].startswith(hub.url)
    everything = b"".join(path.read_bytes() for path in [*tmp_path.rglob("*"), *run.rglob("*")] if path.is_file())
    assert tiny_hub.TOKEN.encode() not in everything
    assert tiny_hub.TOKEN not in said.err + said.out


def test_a_push_that_cant_be_is_one_line_before_anything_is_written(run, hub, tmp_path, monkeypatch, capsys):
    adapter, file = {"adapter_config.json": b"{}"}, {"model.safetensors": b""}
    hub.repos = {"me/open": {"private": False, "files": {}}, "me/lora": {"private": True, "files": adapter}}
    refused = {
        "--push=it": "name a repository as USER/NAME",
        "--push=me/open": "is public: add --public, or name another",
        "--push=me/lora": "an adapter is there; give a model a repository of its own",
        "--push=me/a..b": "a..b",
        "--public": "--public is for --push",
        "--base=me/it": "--base names the base of an adapter: --to=hf writes a whole model",
        "--push=me/new --to=gguf --config.program=reward": "only --to=hf can export a reward model's score head",
    }
    for flags, words in refused.items():
        assert cli.main(["export", str(run), *flags.split()]) == 2, flags
        said = capsys.readouterr().err.strip().splitlines()
        assert words in said[-1], flags
    assert "me/new" not in hub.repos
    hub.repos["me/model"] = {"private": True, "files": file}
    with pytest.raises(config.ConfigError, match="a model is there; give an adapter a repository of its own"):
        export.hub.prepare("me/model", "peft", False)
    export.hub.prepare("me/open", "hf", True)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert cli.main(["export", str(run), "--push=me/it"]) == 2
    assert "has the token the right to write there?" in capsys.readouterr().err
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    assert cli.main(["export", str(run), "--push=me/it"]) == 2
    assert "--push needs a token that may write: `hf auth login`, or HF_TOKEN" in capsys.readouterr().err
    assert hub.puts == []
    assert not (tmp_path / "exports").exists()
