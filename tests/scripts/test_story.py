"""scripts/story.sh: with stand-ins for its programs what it would run, and once, small, all of it."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import story_data
from documented import ROOT
from tiny_pages import rows

from jaxlm import config
from jaxlm.cli import cli
from jaxlm.config import config_files

SCRIPT = ROOT / "scripts/story.sh"
OWN = {"DOCS": "docs", "CHATS": "chats.jsonl", "PAIRS": "pairs.jsonl"}  # of the user
STAGES = ("01-documents", "02-prepare", "03-tokenize", "04-plan", "05-base", "06-eval", "07-examples", "07-sums", "08-sft",
          "09-dpo", "10-grpo", "11-eval", "12-export")  # fmt: skip
# Notes its arguments; fails with the code that a file named after them holds.
STAND_IN = """#!{python}
import json, os, pathlib, sys
name, argv = os.path.basename(sys.argv[0]), sys.argv[1:]
with open("{log}", "a") as log:
    log.write(json.dumps([name, *argv]) + "\\n")
if argv[-1:] == ["price"]:
    print({usd})
if name == "python" and argv[1] == "chats":
    made = pathlib.Path(argv[2])
    made.mkdir(parents=True)
    (made / "chats.jsonl").touch(), (made / "pairs.jsonl").touch()
for failing in pathlib.Path("{folder}").glob("fails *"):
    if failing.name.removeprefix("fails ") in " ".join([name, *argv]):
        sys.exit(int(failing.read_text()))
"""


class Story:
    """The script beside stand-ins for jaxlm and python."""

    def __init__(self, folder: pathlib.Path, usd: float = 0):
        self.folder, self.log, self.bin = folder, folder / "log", folder / "bin"
        self.bin.mkdir(parents=True)
        (folder / "docs").mkdir()
        text = STAND_IN.format(python=sys.executable, log=self.log, usd=usd, folder=folder)
        for name in ("jaxlm", "python"):
            (self.bin / name).write_text(text)
            (self.bin / name).chmod(0o755)
        for name in ("chats.jsonl", "pairs.jsonl"):
            (folder / name).touch()

    def run(self, **given: str) -> subprocess.CompletedProcess:
        self.log.unlink(missing_ok=True)
        env = {"PATH": f"{self.bin}:/usr/bin:/bin", "OUT": "out"} | given
        return subprocess.run([SCRIPT], cwd=self.folder, env=env, capture_output=True, text=True, check=False)

    def commands(self, name: str) -> list[list[str]]:
        lines = [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []
        return [words[1:] for words in lines if words[0] == name]

    @property
    def trained(self) -> list[list[str]]:
        return [words for words in self.commands("jaxlm") if words[0] == "train"]

    def fail(self, words: str, code: int) -> pathlib.Path:
        path = self.folder / f"fails {words}"
        path.write_text(str(code))
        return path


@pytest.fixture
def story(tmp_path):
    return Story(tmp_path)


def overrides(words: list[str]) -> list[str]:
    return [word.removeprefix("--config.") for word in words if word.startswith("--config.")]


@pytest.mark.parametrize(
    ("size", "own"), [("tiny", {}), ("small", {}), ("small", OWN), ("1b", OWN | {"USD_PER_HOUR": "1.6"})]
)
def test_every_verb_config_key_and_option_exists(story, size, own, capsys, monkeypatch):
    done = story.run(SIZE=size, **own)
    assert (done.returncode, done.stderr) == (0, "")
    found = story.commands("jaxlm")
    verbs = "prepare tokenize plan train eval train train train eval export report chat"
    assert [words[0] for words in found] == verbs.split()
    monkeypatch.chdir(story.folder)
    saved = config.to_json(config.resolve(config_files.load("quickstart", ["workdir=w"])))
    for run in ("base", "sft", "dpo", "grpo"):
        (story.folder / "out" / run).mkdir()
        (story.folder / "out" / run / "config.json").write_text(saved)
    for folder in ("docs", "out/documents"):
        (story.folder / folder).mkdir(exist_ok=True)
        (story.folder / folder / "a.md").touch()
    for words in found:
        assert (cli.main([*words, "--help=seed"]), *capsys.readouterr()[1:]) == (0, ""), words
    for words in story.trained:
        config.resolve(config_files.load(words[1], overrides(words)))
    assert [config_files.load(words[1]).program for words in story.trained] == ["pretrain", "sft", "dpo", "grpo"]
    for words in story.commands("python"):
        assert words[0] == "-c" or story_data.parser().parse_args(words[1:]).run


def test_each_stage_begins_with_the_one_before(story):
    story.run()
    trained = [dict(override.split("=", 1) for override in overrides(words)) for words in story.trained]
    assert [keys.get("origin") for keys in trained] == [None, "out/base", "out/sft", "out/dpo"]
    assert [keys["workdir"] for keys in trained] == ["out/base", "out/sft", "out/dpo", "out/grpo"]
    assert {keys["sample.prompts"] for keys in trained} == {"('What does str.split do?',)"}
    story.run(SIZE="1b", OUT="1b", **OWN, USD_PER_HOUR="1.6")  # its config has better prompts for a base model
    assert ["sample.prompts" in " ".join(words) for words in story.trained] == [False, True, True, True]


def test_what_is_done_is_not_done_again_and_what_failed_is(story):
    failing = story.fail("train dpo", 3)
    assert story.run().returncode == 3
    assert story.commands("jaxlm")[-1][:2] == ["train", "dpo"]
    assert {path.name for path in (story.folder / "out/took").iterdir()} == {*STAGES[:-4]}
    failing.unlink()
    assert story.run().returncode == 0
    assert [words[0] for words in story.commands("jaxlm")] == ["train", "train", "eval", "export", "report", "chat"]
    assert {path.name for path in (story.folder / "out/took").iterdir()} == {*STAGES}
    assert story.run().returncode == 0
    assert [words[0] for words in story.commands("jaxlm")] == ["report", "chat"]


def test_your_own_examples_are_taken_and_hold_out_their_own(story):
    story.run(**OWN)
    assert (story.folder / "out/examples/chats/yours-chats.jsonl").resolve() == story.folder / "chats.jsonl"
    said = " ".join(word for words in story.commands("jaxlm") for word in words)
    assert "prepare docs --out=out/data" in said
    assert "data.path=pairs.jsonl" in said
    assert "val_path" not in said
    assert not any({"docs", "chats"} & {*words} for words in story.commands("python"))
    story.run(OUT="other", CHATS="chats.jsonl")  # pairs are made, the chats are not
    held_out = [words[1] for words in story.commands("jaxlm") if any("val_path" in word for word in words)]
    assert held_out == ["dpo"]


def test_flags_of_a_stage_come_last_and_a_question_may_have_marks(story):
    story.run(BASE_FLAGS="--config.phases.accept=main --config.seed=1", GRPO_FLAGS="--config.seed=2", ASK="it's?")
    base, sft, _, grpo = story.trained
    assert base[-2:] == ["--config.phases.accept=main", "--config.seed=1"]
    assert grpo[-1] == "--config.seed=2"
    assert "--config.seed=1" not in sft
    prompts = config_files.load("sft", [o for o in overrides(sft) if o.startswith("sample.prompts")]).sample.prompts
    assert prompts == ("it's?",)


@pytest.mark.parametrize(
    ("variable", "flags", "said"),
    [
        ("DPO", "--config.dpo.beta=0.2 --config.dpo.bta=1", "DPO_FLAGS: unknown key config.dpo.bta"),
        ("BASE", "--config.train.steps=many", "BASE_FLAGS: config.train.steps"),
        ("SFT", "--config.optim.lr=-1", "SFT_FLAGS: config.optim.lr=-1"),
        ("GRPO", "--config.optim.name=adam", "GRPO_FLAGS: config.optim.name"),
        ("GRPO", "--confg.seed=1", "GRPO_FLAGS: --confg.seed=1 is not --config.KEY=VALUE"),
        ("DPO", "--config.dpo.beta 1", "DPO_FLAGS: --config.dpo.beta is not --config.KEY=VALUE"),
    ],
)
def test_which_flags_are_wrong(monkeypatch, capsys, variable, flags, said):
    base = str(ROOT / "scripts/story_base.py")
    monkeypatch.setenv(f"{variable}_FLAGS", "--config.seed=1 --config.train.steps=900")
    assert story_data.main(["flags", base]) == 0
    monkeypatch.setenv(f"{variable}_FLAGS", flags)
    assert story_data.main(["flags", base]) == 2
    assert said in capsys.readouterr().err


def test_a_price_makes_dollars(tmp_path):
    story = Story(tmp_path, usd=2.7)
    story.run()
    assert all("--config.hardware.usd_per_hour=2.7" in words for words in story.trained)
    assert ["report", "out/grpo", "--took=out/took"] in story.commands("jaxlm")
    assert float((tmp_path / "out/took/05-base").read_text()) >= 0


OWN_1B = {"SIZE": "1b", "DOCS": "docs"}


@pytest.mark.parametrize(
    ("given", "failing", "line"),
    [
        ({"SIZE": "huge"}, {}, "story: SIZE=huge: tiny, small or 1b\n"),
        (OWN_1B, {}, "story: SIZE=1b learns from your own: DOCS=FOLDER CHATS=FILE PAIRS=FILE\n"),
        (
            OWN_1B | {"CHATS": "chats.jsonl", "PAIRS": "chats.jsonl"},
            {},
            "story: SIZE=1b has budgets in dollars: USD_PER_HOUR=PRICE, what this machine costs\n",
        ),
        ({"DOCS": "chats.jsonl"}, {}, "story: DOCS=chats.jsonl: there is no such folder\n"),
        ({"OUT": "chats.jsonl"}, {}, "story: OUT=chats.jsonl is a file: name a folder\n"),
        ({"USD_PER_HOUR": "abc"}, {}, "story: USD_PER_HOUR=abc: a number, such as 2.7\n"),
        ({"CHATS": "chat.jsonl"}, {}, "story: there is no file or folder chat.jsonl\n"),
        ({}, {"reasoning_gym": 1}, 'story: GRPO learns sums of reasoning-gym: pip install -e ".[rl]"\n'),
        ({"DPO_FLAGS": "--config.dpo.bta=1"}, {"flags": 2}, ""),  # the line is story_data's, see above
    ],
)
def test_what_is_missing_is_one_line_before_anything_is_done(story, given, failing, line):
    for words, code in failing.items():
        story.fail(words, code)
    done = story.run(**given)
    assert (done.returncode, done.stderr, story.commands("jaxlm")) == (2, line, [])
    assert not (story.folder / "out").exists()


def test_without_jaxlm_it_says_how_to_install_it(story):
    (story.bin / "jaxlm").unlink()
    done = story.run(PATH=f"{story.bin}:/usr/bin:/bin")
    assert (done.returncode, done.stderr.count("\n"), "pip install" in done.stderr) == (2, 1, True)


def test_chats_and_pairs_of_functions(tmp_path, capsys):
    assert story_data.main(["chats", str(tmp_path), "--megabytes=0.2"]) == 0
    capsys.readouterr()
    read = {
        name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("chats", "pairs", "held_out/chats", "held_out/pairs")
    }
    said = "Return a list of the substrings in the string, using sep as the separator string."
    assert {"prompt": "What does str.split do?", "response": said} in read["chats"]
    for chats, pairs in (("chats", "pairs"), ("held_out/chats", "held_out/pairs")):
        assert [p["prompt"] for p in read[pairs]] == [c["prompt"] for c in read[chats]]
        answers = {c["response"] for c in read[chats]}
        for chat, pair in zip(read[chats], read[pairs], strict=True):
            assert pair["chosen"] == chat["response"] != pair["rejected"]
            assert pair["rejected"] in answers  # of its own part: nothing that is held out is learnt from
    asked = [{chat["prompt"] for chat in read[name]} for name in ("chats", "held_out/chats")]
    assert not asked[0] & asked[1]
    assert 0.01 < len(asked[1]) / len(asked[0]) < 0.12


def test_documents_are_raw_pages_readmes_and_sources(tmp_path, capsys):
    assert story_data.main(["docs", str(tmp_path), "--megabytes=0.3"]) == 0
    assert re.match(r"\d+ html files, \d+ readme files, \d+ code files in ", capsys.readouterr().out)
    assert {path.name for path in tmp_path.iterdir()} == {"html", "readme", "code"}
    page = (tmp_path / "html/str.html").read_text()
    assert "<h2><code>str.split</code></h2>" in page
    assert "cookies" in page  # what `jaxlm prepare` is for
    size = sum(path.stat().st_size for path in tmp_path.rglob("*.*"))
    assert 0.1e6 < size < 0.6e6


@pytest.mark.parametrize(
    ("name", "gigabytes", "usd"),
    [
        ("NVIDIA H100 80GB HBM3", 80, 2.70),
        ("NVIDIA A100-SXM4-40GB", 40, 1.10),
        ("NVIDIA A100-SXM4-80GB", 80, 1.60),
        ("NVIDIA H200 NVL", 140, 3.30),
        ("NVIDIA H200", 140, 3.50),
        ("Tesla K80", 12, 0.0),
    ],
)
def test_a_gpu_has_the_price_of_the_prices_file(name, gigabytes, usd):
    assert story_data.price_of(name, gigabytes * 2**30) == usd


@pytest.mark.recipe
@pytest.mark.timeout(1500)
def test_all_of_it_small(tmp_path):
    """Raw documents to an assistant, in the order of a newcomer, by real programs."""
    pytest.importorskip("reasoning_gym", reason="the story ends with sums of reasoning-gym: pip install -e '.[rl]'")
    env = os.environ | {"SIZE": "tiny", "OUT": str(tmp_path / "out"), "USD_PER_HOUR": "36", "PYTHONPATH": str(ROOT)}
    env["PATH"] = f"{pathlib.Path(sys.executable).parent}:{env['PATH']}"
    done = subprocess.run([SCRIPT], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    out = tmp_path / "out"
    assert {path.name for path in (out / "took").iterdir()} == {*STAGES}
    found = rows((out / "grpo/report.html").read_text())
    table = {row[0]: row for row in found[: found.index(next(row for row in found if row[0] == "all")) + 1]}
    assert [*table][1:] == ["data", "pretraining", "SFT", "DPO", "GRPO", "all"]
    assert table["pretraining"][-1] == "story_base in phases: smoke, main, finish"
    for stage, figure in (("pretraining", "loss"), ("SFT", "loss"), ("DPO", "ranked right"), ("GRPO", "reward")):
        assert figure in table[stage][1], table[stage]
        assert table[stage][3].startswith("$")
    commands = {row[0]: row for row in found[found.index(["command", "time", "cost"]) + 1 :] if len(row) == 3}
    assert {*STAGES, "all"} <= {*commands}
    assert (out / "hf/model.safetensors").is_file()
    assert "What does str.split do?" in (out / "grpo/report.html").read_text()
    again = subprocess.run([SCRIPT], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert again.returncode == 0
    assert "jaxlm train" not in again.stdout
