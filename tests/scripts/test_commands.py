"""Every command of README, docs, docstrings of configs and the leaderboard is parsed to its end, and most are run, shrunk.

Not run is what needs a GPU, a server, another package, hours, or the network: `PARSED` says which and why. Of the others run
those that have a word which none before has.
"""

import argparse
import contextlib
import importlib.util
import io
import itertools
import pathlib
import re
import runpy
import shutil
import sys
import tomllib
import warnings

import documented
import pytest
import tiny_world
from documented import ROOT, Command

from jaxlm.cli import cli
from jaxlm.cli.verbs import TRAINING, VERBS, module
from jaxlm.config import ConfigError, config_files

DAYS, PEOPLE = "days on a GPU", "serves until ctrl-C"
BY_SMALLEST = documented.by_smallest()
ELSEWHERE = "test_leaderboard.py runs its script by --smallest", ".ci/run begins with it, whole"
# What is not run, and why; the first that matches counts.
PARSED = {
    r"pip install": "installs",
    r"python -m jaxlm.main --config=configs/quickstart.py$": ELSEWHERE[1],
    r"pytest": "tests have a run of their own",
    r"tensorboard|lm_eval|python -m nltk": "another program",
    r"jaxlm train (sft|dpo|reward|grpo|ppo)$": "the name of a way: what it begins with is not said here",
    r"jaxlm train (grpo|ppo) ": "scripts/rl_figures.py trains by both, and test_leaderboard.py runs that",
    r"jaxlm doctor": "looks at the machine, and times it",
    r"jaxlm (train|tune|ladder|grow) (gpuburnout|domain|speed_1b|pilot)\w*": DAYS,
    r"jaxlm plan domain_7b": "compiles for a mesh, minutes",
    r"jaxlm (prepare|tokenize) configs/data/gpuburnout.py": "reads the hub",
    r"jaxlm tune": "minutes",
    r"jaxlm serve \S+( --(port|rows|weights)=\w+| \w+=\S+)*$|jaxlm arena RUN_A|jaxlm arena runs": PEOPLE,
    r"scripts/story.sh": "minutes; pytest -m recipe runs all of it, small",
    r"python scripts/hub_layout": "files of questions, of which there are none; tests/tiny_eval.py lays some out",
    r"python scripts/check_install": "installs, minutes for each Python",
    r"python scripts/(same_bits|check_plan|make_techdocs_corpus|posttrain_figures|hh_figures)": "hours, a GPU or the network",
    r"python scripts/bench_(gpu|step|overhead|data|recipe)": "a GPU, another package, hours",
}
# Flags that make a verb's command end in seconds; of train see `tiny_world`.
SHRUNK = {
    "sample": ["--max-new-tokens=2"],
    "chat": ["--max-new-tokens=2"],
    "junk": ["--tokens=128"],
    "eval": ["--limit=2", "--config.eval.data_dir=BENCHMARKS", "--config.eval.redteam.toxicity=False"],
    "serve": ["--rows=2"],
    "plan": ["--config.plan.measure=never", "--config.plan.accelerator=H100"],
    "ladder": ["--plan", "--sizes=32,40,48", "--tokens=4k,8k,16k", "--config.plan.measure=never"],
    "sweep": ["--plan", "--config.data.dir=DATA", "--config.plan.measure=never"],
    "prepare": ["--config.prepare.workers=1"],
    "tokenize": ["--config.model.vocab_size=512", "--config.prepare.report_mb=0"],
}
# Words of the docs, and what they are in the small world.
SMALLER = {
    "CONFIG": "configs/data/techdocs.py",
    "--budget=USD": "--budget=50",
    "--checkpoint=8000,16000": "--checkpoint=2,4",
    "--checkpoint=800": "--checkpoint=2",
    **{
        f"--config.data.dir={name}": "--config.data.dir=DATA"
        for name in ("DIR", "data/docs", "data/mine", "data/mine-2")
    },
    "--config.data.dir=runs/quickstart/data": "--config.data.dir=DATA",
    "--config.data.final.weights.math=40": "--config.data.final.weights.a=2",
    **{f"--config.origin={name}": "--config.origin=runs/quickstart" for name in ("RUN", "runs/base")},
    "--config.origin=SFT_RUN": "--config.origin=runs/sft",
    "--help=SECTION": "--help=optim",
    **dict.fromkeys(("--step=100", "--step=N"), "--step=2"),
    **dict.fromkeys(("--steps=2000", "--steps=200", "--steps=N", "--steps=460"), "--steps=6"),
    "--sweep=8192,16384,32768": "--sweep=512,1024",
    "--took=FOLDER": "--took=TOOK",
    "--without=FILE": "--without=personx.jsonl",
    "runs/sft@200": "runs/sft@2",
}
ENDED: set[tuple[str, ...]] = set()  # what has run
ENDS = {  # with this exit code; the others with 0
    "jaxlm train quickstart --config.modl.n_layers=3": 2,
    # The small world's runs trained on eight devices of this process; a replay has a process of its own, with one.
    "jaxlm verify runs/quickstart": 3,
    "jaxlm verify RUN --steps=460": 3,
}

GROUPS: dict[str, list[Command]] = {}
for one in documented.every():
    GROUPS.setdefault(str(one), []).append(one)


def why_parsed(command: Command) -> str:
    """Returns why a command is not run here; "" if it is."""
    text = " ".join(command.words)
    if "--help" in text:
        return ""
    if documented.without_numbers(command) in BY_SMALLEST:
        return ELSEWHERE[0]
    return next((why for pattern, why in PARSED.items() if re.match(pattern, text)), "")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HF_HUB_OFFLINE", "1")
        tiny_world.make(folder)
        yield folder


def taken(command: Command, folder: pathlib.Path, run: bool) -> list[str]:
    """Returns a command's words for the small world: a fresh folder for what it makes, a copy of the run it goes on with."""
    words = [SMALLER.get(word, word) for word in command.words]
    if words[:3] == ["python", "-m", "jaxlm.main"]:
        words = ["jaxlm", "train", *words[3:]]
    if words[:2] == ["jaxlm", "train"]:
        return trained(words, folder, run)
    if words[:2] == ["jaxlm", "grow"]:
        return grown(words, folder)
    if not run or "--help" in " ".join(words):
        return words
    if command.script == "scripts/measure_export.py":
        return [word.replace("gpuburnout_1b", "tiny.py") for word in words]
    if command.script:
        return [*words, *["--smallest"] * command.place.startswith("dev/LEADERBOARD.md")]
    words = [re.sub(r"^(--(?:out|remove|export-\w+))=", rf"\1={folder}/", word) for word in words]
    if words[1] == "prepare":
        words.append(f"--config.data.dir={folder}/data" if words[2].endswith(".py") else f"--out={folder}/data")
    shrunk = SHRUNK.get(words[1], [])
    if any(word.startswith("--text") for word in words):  # which measures whole documents, and takes no limit
        shrunk = [word for word in shrunk if not word.startswith("--limit")]
    if words[1:3] == ["sweep", "dpo"]:  # whose base may have a tokenizer of its own
        shrunk = [word for word in shrunk if not word.startswith("--config.data.dir")]
    return [*words, *shrunk]


def trained(words: list[str], folder: pathlib.Path, run: bool) -> list[str]:
    """Returns the words of a train command, with what it leaves open in front and what makes it short behind."""
    if "--help" in " ".join(words):
        return words
    if words[2] in ("runs/larger", "runs/2b"):  # which the command before it grows
        sizes = ("--config.model.n_layers=2", "--config.model.d_model=48")
        assert cli.main(["grow", "quickstart", "--config.origin=RUN", f"--config.workdir={folder}/run", *sizes]) == 0
        return [*words[:2], f"{folder}/run", *words[3:], *tiny_world.SHORT, "--config.train.seq_len=32"]
    if words[2] in ("RUN", "runs/quickstart"):
        more = [] if "--branch=decay" in words else [f"--config.train.steps={tiny_world.STEPS + 2}"]
        if "--config.data.path=TEXTS" in words:  # docs/import.md says it of a run that was imported
            assert cli.main(["import", "HF_DIR", f"--out={folder}/run"]) == 0
            more = [*tiny_world.SHORT, "--config.train.seq_len=32"]
        else:
            shutil.copytree(words[2], folder / "run")
        return [*words[:2], str(folder / "run"), *words[3:], *more]
    before, short = tiny_world.TRAINING[_loaded(words).program]
    if any(word.startswith(("--config.data.path", "--config.data.dir")) for word in words):
        before = [word for word in before if "config.data" not in word and "reward.tasks" not in word]
    if any("origin=HF_DIR" in word for word in words):  # which says what the model is
        short = [word for word in short if word not in tiny_world.MODEL]
    if any("eval.tasks=" in word for word in words):
        short = [*short, "--config.eval.data_dir=BENCHMARKS"]
    words = [*words[:2], *before, *words[2:], *(short if run else []), f"--config.workdir={folder}/run"]
    return [*{word.partition("=")[0] if word.startswith("--config.") else word: word for word in words}.values()]


def grown(words: list[str], folder: pathlib.Path) -> list[str]:
    """Returns the words of a grow command, for a new folder; the key-value heads serve as many query heads as RUN's."""
    heads = _loaded(words).model.n_heads // 2
    return [*words, f"--config.workdir={folder}/run", f"--config.model.n_kv_heads={heads}"]


def _loaded(words: list[str]):
    named = [word.removeprefix("--config=") for word in words[2:] if not word.startswith("--config.")]
    return config_files.load(named[0] if named else "base", [])


def script(words: list[str], monkeypatch) -> int:
    """Runs one of our scripts in this process; returns its exit code."""
    name = next(word for word in words if word.startswith("scripts/"))
    path = ROOT / name
    monkeypatch.setattr(sys, "argv", [str(path), *words[words.index(name) + 1 :]])
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    return 0


# Scripts that take arguments, but for one that runs in an environment of its own.
TEXTS = {path: path.read_text() for path in sorted((ROOT / "scripts").glob("*.py"))}
BY_ARGUMENTS = [path for path, text in TEXTS.items() if "ArgumentParser(" in text and "python -m venv" not in text]
CAN_RUN = [group[0] for group in GROUPS.values() if not why_parsed(group[0])]
RUN = [str(command) for command in documented.with_new_words(CAN_RUN)]


def places(text: str) -> str:
    """Returns a command with the files and lines in which it stands."""
    return f"{', '.join(command.place for command in GROUPS[text])}: {text}"


@pytest.mark.scripts
@pytest.mark.parametrize("text", RUN)
def test_a_command_runs(world, text, tmp_path, monkeypatch):
    command = GROUPS[text][0]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"What is a list?\n")))
    for setting in command.environment:
        monkeypatch.setenv(*setting.split("=", 1))
        monkeypatch.syspath_prepend(str(world))  # what PYTHONPATH=. does
    words = taken(command, tmp_path, run=True)
    if words[:2] == ["jaxlm", "train"] and words[2] != f"{tmp_path}/run" and "--help" not in text and text not in ENDS:
        with monkeypatch.context() as patch:  # with its own values, which are not left in it, shrunk
            assert parsed(command, taken(command, tmp_path, run=False), patch) == 0, places(text)
    said = (re.sub(r"^--config=|^configs/|\.py$", "", word.replace(str(tmp_path), "")) for word in words)
    if (alike := tuple(sorted(said))) in ENDED:
        return
    ENDED.add(alike)
    if command.script:
        assert script(words, monkeypatch) == 0, places(text)
    else:
        assert words[0] == "jaxlm", f"neither run nor parsed: {places(text)}"
        assert cli.main(words[1:]) == ENDS.get(text, 0), places(text)


@pytest.mark.scripts
@pytest.mark.parametrize("text", [text for text in GROUPS if text not in RUN])
def test_a_command_is_parsed_to_its_end(world, text, tmp_path, monkeypatch):
    command = GROUPS[text][0]
    words = taken(command, tmp_path, run=False)
    assert parsed(command, words, monkeypatch) == 0, places(text)


@pytest.mark.scripts
def test_what_is_only_parsed_is_told_and_little():
    reasons = {text: why_parsed(group[0]) for text, group in GROUPS.items()}
    found = {text: why for text, why in reasons.items() if why not in ("", *ELSEWHERE)}
    count, every = (sum(len(GROUPS[text]) for text in texts) for texts in (found, GROUPS))
    lines = [
        f"{count} of {every} commands are only parsed:",
        *(f"{places(text)} ({why})" for text, why in found.items()),
    ]
    warnings.warn("\n  ".join(lines), stacklevel=1)  # which pytest prints behind all, from its workers too
    assert count <= 120


@pytest.mark.scripts
@pytest.mark.parametrize("path", BY_ARGUMENTS, ids=lambda path: path.name)
def test_help_does_nothing_but_tell(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert script([f"scripts/{path.name}", "--help"], monkeypatch) == 0
    assert capsys.readouterr().out.startswith("usage: ")
    assert not [*tmp_path.iterdir()]


def parsed(command: Command, words: list[str], monkeypatch) -> int:
    """Returns 0 if what a command names is there: verb, config, keys, options, files, extras, markers."""
    if command.script.endswith(".sh"):
        return 0 if (ROOT / command.script).is_file() else 1
    if command.script:
        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", and_no_further)
        return script(words, monkeypatch)
    if words[0] == "jaxlm":
        if words[1] not in VERBS:
            raise KeyError(words[1])
        for name in {module(words[1], program) for program in TRAINING}:
            monkeypatch.setattr(f"jaxlm.commands.{name}.run", lambda config, args: 0)
        return cli.main(words[1:])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    if words[:2] == ["pip", "install"]:
        asked = {extra for extras in re.findall(r"\[([\w,-]+)\]", " ".join(words)) for extra in extras.split(",")}
        known = {*project["project"]["optional-dependencies"], "api"}  # the last is lm-eval's
        return len(asked - known)
    if words[0] == "pytest":
        markers = {line.partition(":")[0] for line in project["tool"]["pytest"]["ini_options"]["markers"]}
        strange = [word for before, word in itertools.pairwise(words) if before == "-m" and word not in markers]
        missing = [word for word in words if word.startswith("tests/") and not (ROOT / word).exists()]
        return len(strange) + len(missing)
    name = words[words.index("-m") + 1].partition(".")[0] if words[0] == "python" else words[0]
    return 0 if importlib.util.find_spec(name.replace("-", "_")) else 1


PARSE = argparse.ArgumentParser.parse_args


def and_no_further(parser: argparse.ArgumentParser, args=None, namespace=None):
    """Parses, as a script asks for, and ends it there."""
    PARSE(parser, args, namespace)
    sys.exit(0)


def test_commands_are_found_with_their_lines():
    text = """
    jaxlm train a --config.seed=1 \\
        --config.workdir=b      # says
    python -m jaxlm.main --config=a $(cat tuned.txt)

`jaxlm plan --help`, and `jaxlm sample RUN
--prompt=b`; `jaxlm tune`
jaxlm sets nothing

```
A=1 jaxlm audit c && pip install d
$ jaxlm prepare d
jaxlm: no such file
```
```python
    python = d
```
"""
    said = [(command.place, str(command)) for command in documented.commands(text, "a.md")]
    assert said == [
        ("a.md:2", "jaxlm train a --config.seed=1 --config.workdir=b"),
        ("a.md:4", "python -m jaxlm.main --config=a"),
        ("a.md:6", "jaxlm plan --help"),
        ("a.md:6", "jaxlm sample RUN --prompt=b"),
        ("a.md:11", "A=1 jaxlm audit c"),
        ("a.md:11", "pip install d"),
        ("a.md:12", "jaxlm prepare d"),
    ]


@pytest.mark.parametrize("wrong", ["trains local_35m", "train local_36m", "plan local_35m --config.plan.mash=1"])
def test_a_wrong_command_is_noticed(wrong, monkeypatch, tmp_path):
    command = Command("a.md:1", ("jaxlm", *wrong.split()))
    with contextlib.suppress(KeyError, ConfigError):
        assert parsed(command, [*command.words], monkeypatch) == 2
