"""`jaxlm compare`: two runs, two checkpoints, votes, a command; and how it refuses."""

import json
import shutil

import numpy as np
import pytest
import tiny_hf

from jaxlm import config
from jaxlm.cli import cli
from jaxlm.config import config_files
from jaxlm.eval import results
from jaxlm.eval.results import Item, TaskResult


def make(folder, step: int, seed: int, better: float = 0.0):
    folder.mkdir(exist_ok=True)
    c = config.resolve(config_files.load("quickstart", [f"workdir={folder}"]))
    (folder / "config.json").write_text(config.to_json(c))
    random = np.random.default_rng(0)
    common, bits = random.random(400), random.gamma(2.0, size=400)
    own = np.random.default_rng(seed).random(400)
    right = (0.8 * common + 0.2 * own < 0.4 + better).astype(float)
    items = [
        Item(str(n), {"acc": float(right[n]), "bits_per_byte": float(bits[n] - better)}, {"question": f"{n}?"})
        for n in range(400)
    ]
    results.write(folder, [TaskResult("arc_easy", {"acc": right.mean()}, {}, 0.25, 0, items)], {"step": step})


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "a", 10, seed=1)
    make(tmp_path / "a", 20, seed=2, better=0.1)
    make(tmp_path / "b", 20, seed=3, better=0.1)
    return tmp_path


def run(*words):
    return cli.main(["compare", *words])


def test_two_runs_and_two_checkpoints(runs, capsys):
    assert run("a", "b") == 0
    assert "a and b can't be told apart on ARC-Easy" in capsys.readouterr().out
    assert run("a", "--checkpoint=10,20") == 0
    out = capsys.readouterr().out
    assert "step 20 is better on ARC-Easy" in out
    assert "bits per byte of the answers are .100 lower for" in out
    assert "p-values are corrected for the number of comparisons (Holm), scores and bits per byte apart: 1 and 1" in out


def test_a_checkpoint_with_itself(runs, capsys):
    assert run("a", "--checkpoint=10,10", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["p"] for one in found["comparisons"]] == [1.0, 1.0]
    assert found["a"] == found["b"] == {"run": found["a"]["run"], "step": "10"}
    assert "can't be told apart on ARC-Easy (p = 1)" in found["words"][0]


def test_votes(runs, capsys):
    (runs / "votes.jsonl").write_text("".join(json.dumps({"winner": "b", "item": n}) + "\n" for n in range(12)))
    assert run("a", "b", "--votes=votes.jsonl") == 0
    assert "b at latest" not in (out := capsys.readouterr().out)
    assert "b is better by the votes: 1.000 against .000 (p < .001)" in out
    (runs / "votes.jsonl").write_text('{"winner": "b"}\n{"win')
    assert run("a", "b", "--votes=votes.jsonl") == 2
    assert "line 2" in capsys.readouterr().err


def test_a_command(runs, capsys):
    (runs / "score.sh").write_text('for i in 1 2 3 4 5 6 7 8; do test "$1" -ef b; echo "$((1 - $?))"; done\n')
    assert run("a", "b", "--command=sh score.sh") == 0
    assert "b is better on the command, if higher is better: 1.000 against .000 (p = .008)" in capsys.readouterr().out
    assert run("a", "b", "--command=sh score.sh", "--lower-is-better") == 0
    assert "a is better on the command, where lower is better: .000 against 1.000 (p = .008)" in capsys.readouterr().out
    assert run("a", "b", "--lower-is-better") == 2
    assert "--lower-is-better is for --command's scores" in capsys.readouterr().err
    for command, code, words in (
        ("false", 1, "failed with exit code 1"),
        ("echo no", 2, "it must print a number a line"),
        ("true", 2, "printed no scores"),
    ):
        assert run("a", "b", f"--command={command}") == code
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("a",), "two checkpoints of one run: --checkpoint=A,B"),
        (("a", "b", "--checkpoint=10,x"), "give two steps"),
        (("a", "b", "--checkpoint=10,20,30"), "give two steps"),
        (("a", "--checkpoint=10,15"), "only of 10, 20: first jaxlm eval"),
        (("a", "c"), "no results of jaxlm eval in c: first jaxlm eval c --tasks=arc_easy,piqa, or --text=FILES"),
        (("a", "b", "--votes=x", "--command=y"), "two ways to judge"),
        (("a", "b", "--votes=x"), "No such file"),
        (("nowhere", "b"), "nowhere"),
        (("a", "runs/nowhere"), "no run in runs/nowhere: there is no such folder"),
    ],
)
def test_what_is_refused(runs, capsys, words, said):
    (runs / "c").mkdir(exist_ok=True)
    assert run(*words) == 2
    assert said in capsys.readouterr().err


def test_a_run_with_a_model_of_hugging_face(runs, capsys):
    """Either way round; a model has no steps to be called by."""
    tiny_hf.weights(runs / "model", vocab_size=300)
    shutil.copytree(runs / "b/eval/20", runs / "model/eval/0")
    for words in (("a", "model"), ("model", "a")):
        assert run(*words, "--json") == 0
        said = json.loads(capsys.readouterr().out)["words"][0]
        assert said.startswith(" and ".join({"a": "a at 20"}.get(word, word) for word in words))
