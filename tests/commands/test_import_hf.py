"""`jaxlm import`: a run of a Hugging Face model, that samples, trains and stands alone."""

import dataclasses
import json
import pathlib
import shutil
import types

import jax
import numpy as np
import pytest
import tiny_hf
import tiny_models as tiny
from safetensors.numpy import load_file, save_file
from tiny_keys import words
from tiny_steps import make_mesh

from jaxlm import models
from jaxlm.cli import cli
from jaxlm.config import RunError
from jaxlm.devices import sharding
from jaxlm.host import files
from jaxlm.interop import peft
from jaxlm.run import metrics
from jaxlm.run.checkpoints import keep, verify
from jaxlm.train import origin

pytest.importorskip("tokenizers")
SMALL = words("""
    --config.train.batch_size=8 --config.train.seq_len=32 --config.runs.supervise=off --config.log.tensorboard=False
    --config.eval.max_mb=0.002
""")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(the folder of a model, the run that was imported from it)."""
    root = tmp_path_factory.mktemp("import")
    tiny_hf.weights(root / "model", files=2, qk_norm=True, head_dim=16, vocab_size=450)
    tiny_hf.byte_level(root / "model")
    assert cli.main(["import", str(root / "model"), f"--out={root / 'run'}"]) == 0
    return root / "model", root / "run"


def params_of(folder):
    found = origin.open(folder, readers=peft.READERS)
    model = models.build(dataclasses.replace(found.config.model, dtype="float32"), "xla")
    abstract = models.abstract_params(model)
    return found.params(abstract, sharding.tree_shardings(abstract, models.logical_axes(model), make_mesh()))


def test_the_run_holds_the_model_its_tokenizer_and_where_it_is_from(folders, tmp_path):
    model, run = folders
    assert verify.read_checksums(run / "checkpoints/0") is not None
    assert keep.imported(run / "checkpoints")
    moved = tmp_path / "moved"
    shutil.copytree(run, moved)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(params_of(model)), jax.device_get(params_of(moved)))
    theirs, ours = origin.open(model, readers=peft.READERS), origin.open(moved)
    assert ours.tokenizer().sha256 == theirs.tokenizer().sha256
    assert (ours.config.model, ours.provenance["step"]) == (theirs.config.model, 0)
    assert ours.config.data.tokenizer == str(moved / "tokenizer")
    assert json.loads((run / "run.json").read_text())["starts"][0]["ended"]["why"] == f"imported from {model.resolve()}"
    for file in (moved / "checkpoints/0/params").rglob("*"):
        if file.is_file() and file.stat().st_size > 1000:
            file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(RunError, match="checkpoint 0 is damaged"):
        params_of(moved)


def test_what_can_not_be_imported_is_one_line(folders, tmp_path, capsys):
    model, run = folders
    tiny_hf.weights(tmp_path / "small", vocab_size=300)
    tiny_hf.byte_level(tmp_path / "small")
    for argv, message in (
        ([str(model), f"--out={run}"], "holds a run or a model already"),
        ([str(model), f"--out={model}"], "is the model itself"),
        ([str(model)], "--out"),
        ([str(run), f"--out={tmp_path / 'x'}"], "takes the folder of a Hugging Face model"),
        (["nowhere", f"--out={tmp_path / 'x'}"], "nowhere is not one"),
        ([f"--out={tmp_path / 'x'}"], "none is named"),
        ([str(tmp_path / "small"), f"--out={tmp_path / 'x'}"], "its tokenizer has"),
    ):
        assert cli.main(["import", *argv]) == 2
        said = capsys.readouterr().err.strip()
        assert message in said
        assert "\n" not in said
    assert not (tmp_path / "x").exists()
    assert cli.main(["train", str(model)]) == 2
    assert f"jaxlm train base --config.origin={model}" in capsys.readouterr().err


def test_paths_with_dots_are_as_good_as_others(folders, tmp_path, monkeypatch):
    monkeypatch.chdir(folders[0])
    (tmp_path / "deep").mkdir()
    assert cli.main(["import", "../model", f"--out={tmp_path}/deep/../run"]) == 0
    saved = json.loads((tmp_path / "run/config.json").read_text())
    assert (saved["workdir"], saved["origin"]) == (str(tmp_path / "run"), str(folders[0]))


@pytest.mark.parametrize(("rows", "said"), [(1600, "warning: 1,253 of the model's 1,600 rows have no id"), (1300, "")])
def test_rows_without_ids_are_told_if_they_are_many(tmp_path, capsys, rows, said):
    tiny_hf.weights(tmp_path / "model", vocab_size=rows)
    tiny_hf.byte_level(tmp_path / "model")
    assert cli.main(["import", str(tmp_path / "model"), f"--out={tmp_path / 'run'}"]) == 0
    told = capsys.readouterr().err
    assert said in told
    assert ("warning" in told) == bool(said)


def test_an_import_is_whole_or_not_there(folders, tmp_path, capsys, monkeypatch):
    """What fails leaves nothing; what was killed does not stand in the way; the folder holds nothing of the user's."""
    model, _ = folders
    ill, out = tmp_path / "ill", tmp_path / "run"
    shutil.copytree(model, ill)
    state = load_file(path := ill / "model-00001-of-00002.safetensors")
    state[next(iter(state))].flat[0] = np.nan
    save_file(state, path)
    assert cli.main(["import", str(ill), f"--out={out}"]) == 1
    assert "not finite" in capsys.readouterr().err
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=1000))
        assert cli.main(["import", str(model), f"--out={out}"]) == 1
    assert "needs about 147 kB, and 1 kB are free there" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["ill"]
    (tmp_path / ".run.importing" / "checkpoints" / "0").mkdir(parents=True)
    out.mkdir()
    with files.lock(tmp_path / ".run.importing", "is writing", "folder"):  # another import of the same run
        assert cli.main(["import", str(model), f"--out={out}"]) == 2
    assert "another process is writing" in capsys.readouterr().err
    assert (tmp_path / ".run.importing" / "checkpoints" / "0").is_dir()
    assert cli.main(["import", str(model), f"--out={out}"]) == 0
    assert not (out / ".lock").exists()
    assert keep.imported(out / "checkpoints")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ill", "run"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    assert cli.main(["import", str(model), f"--out={tmp_path / 'mine'}"]) == 2
    assert "is not empty: give a new folder" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def check_export(run, out, original, capsys):
    """Exports the run; transformers must give the original's ids, our logits, and what `jaxlm sample` writes greedily."""
    import torch
    import transformers

    assert cli.main(["export", str(run), "--to=hf", f"--out={out}", "--dtype=f32"]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    texts = ["the cat sat", "  two\n\tspaces", "日本 é😀\x00", "<|im_start|>the dog<|endoftext|>", "", *tiny_hf.TEXTS]
    assert [tokenizer(text)["input_ids"] for text in texts] == [original(text)["input_ids"] for text in texts]
    assert tokenizer.eos_token == original.eos_token
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    inputs = tokenizer("the cat", return_tensors="pt", return_token_type_ids=False)
    found = origin.open(run)
    model = models.build(dataclasses.replace(found.config.model, dtype="float32"), "xla")
    ours = np.asarray(tiny.logits(model, params_of(run), inputs["input_ids"].numpy()))[0, :, :420]
    with torch.no_grad():
        scores = theirs(**inputs).logits[0].numpy()
        ids = theirs.generate(**inputs, do_sample=False, max_new_tokens=8)[0, inputs["input_ids"].shape[1] :]
    np.testing.assert_allclose(scores, ours, atol=1e-4 * np.abs(ours).max())
    capsys.readouterr()
    assert cli.main(["sample", str(run), "the cat", "--max-new-tokens=8", "--temperature=0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parity
@pytest.mark.parametrize("kind", ["qwen3", "smollm"])
def test_continued_pretraining_from_the_command_line(kind, tmp_path, capsys):
    """50 steps from a model of transformers, and back: it agrees with the export on ids, logits and greedy tokens.

    Held-out loss falls, and the run needs the model's folder no more.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3}
    sizes |= {"num_key_value_heads": 1, "max_position_embeddings": 128, "tie_word_embeddings": True, "vocab_size": 420}
    config = transformers.Qwen3Config(**sizes, head_dim=32) if kind == "qwen3" else transformers.LlamaConfig(**sizes)
    theirs = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    folder, run = tmp_path / "model", tmp_path / "run"
    theirs.save_pretrained(folder, max_shard_size="50KB")
    tiny_hf.byte_level(folder)
    rng, words = np.random.default_rng(0), ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran"]
    texts = [" ".join(rng.choice(words, rng.integers(20, 80))) for _ in range(80)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    begun = ["train", "base", f"--config.origin={folder}", f"--config.data.path={tmp_path / 'texts.jsonl'}", *SMALL]
    assert cli.main([*begun, f"--config.workdir={run}", "--config.train.steps=50", "--config.eval.at_start=True"]) == 0
    losses = {r["step"]: r["val/loss"] for r in metrics.records(run / "metrics.jsonl") if "val/loss" in r}
    assert losses[50] < losses[0] - 1
    assert losses[0] == pytest.approx(np.log(420), abs=0.2)
    original = transformers.AutoTokenizer.from_pretrained(folder)
    shutil.rmtree(folder)
    check_export(run, tmp_path / "out", original, capsys)
    if kind == "qwen3":
        return
    assert cli.main([*begun, f"--config.workdir={run}", "--config.train.steps=52"]) == 0
    capsys.readouterr()
    assert cli.main(["sample", str(run), "the cat", "--max-new-tokens=8", "--temperature=0", "--json"]) == 0
    text = json.loads(capsys.readouterr().out)["text"]
    assert set(text.split()[:-1]) <= set(words)


@pytest.mark.parity
def test_an_imported_run_samples_and_trains_in_place(folders, tmp_path, capsys):
    model, run = folders
    texts = []
    for place in (model, run):
        capsys.readouterr()
        assert cli.main(["sample", str(place), "the cat", "--max-new-tokens=4", "--temperature=0", "--json"]) == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0] == texts[1]
    own = tmp_path / "own"
    shutil.copytree(run, own)
    lines = (json.dumps({"text": f"{tiny_hf.TEXTS[0]} {i}"}) for i in range(40))
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    steps = ["--config.train.steps=2", "--config.optim.warmup_steps=1", *SMALL]
    assert cli.main(["train", str(own), f"--config.data.path={tmp_path / 'a.jsonl'}", *steps]) == 0
    assert not keep.imported(own / "checkpoints")
    assert pathlib.Path(own / "data/tokenizer_ids.json").is_file()
    assert cli.main(["train", str(own), "--config.train.steps=3"]) == 0
