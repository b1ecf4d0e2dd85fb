"""Every command of README, docs, docstrings of configs and the leaderboard runs, shrunk; or is parsed to its end.

Parsed is what needs a GPU, a server, another package, hours, or the network: `PARSED` says which and why.
"""

import argparse
import io
import pathlib
import re
import runpy
import shutil
import subprocess
import sys
import tomllib

import documented
import pytest
import tiny_world
from documented import ROOT, Command

from jaxlm import cli, config_files
from jaxlm.verbs import VERBS

DAYS, PEOPLE = "days on a GPU", "serves until ctrl-C"
# What is not run, and why; the first that matches counts.
PARSED = {
    r"pip install|apt-get|pre-commit": "installs",
    r"pytest": "tests have a run of their own",
    r"tensorboard|lm_eval|python -m nltk": "another program",
    r"jaxlm (train|doctor|tune|ladder) (gpuburnout|domain|speed_1b|pilot)\w*": DAYS,
    r"jaxlm plan domain_7b": "compiles for a mesh, minutes",
    r"jaxlm (prepare|tokenize) configs/data/gpuburnout.py": "reads the hub",
    r"jaxlm tune": "minutes",
    r"jaxlm serve \S+( --(port|rows)=\d+)*$|jaxlm arena RUN_A|jaxlm arena runs": PEOPLE,
    r"(python )?scripts/(story.sh|same_bits|check_plan|make_\w+|\w+_figures|posttrain_data|launch)": "hours, a GPU or other machines",
    r"python scripts/bench_gpu.py(?! --sections attention$)": "a GPU",
}
SCRIPTS_OF_THE_LEADERBOARD = sorted(
    {command.script for command in documented.every() if command.place.startswith("dev/")} - {""}
)
# Flags that make a verb's command end in seconds; of train see `tiny_world`.
SHRUNK = {
    "sample": ["--max-new-tokens=2"],
    "chat": ["--max-new-tokens=2"],
    "eval": ["--limit=2", "--config.eval.data_dir=BENCHMARKS"],
    "plan": ["--config.plan.measure=never"],
    "ladder": ["--plan", "--sizes=32,40,48", "--tokens=1M,2M,4M"],
    "prepare": ["--config.prepare.workers=1"],
    "tokenize": ["--config.model.vocab_size=1024"],
}
SMALLER = {"--checkpoint=8000,16000": "--checkpoint=2,4", "runs/sft@200": "runs/sft@2", "--step=100": "--step=2"}
SMALLER |= {"--step=N": "--step=2", "--steps=N": "--steps=6", "--steps=2000": "--steps=6", "--budget=USD": "--budget=50"}
SMALLER |= {"--sweep=8192,16384,32768": "--sweep=512,1024", "gpuburnout_1b": "tiny.py", "CONFIG": "quickstart"}
ENDS = {"jaxlm train quickstart --config.modl.n_layers=3": 2}  # with this exit code; the others with 0

GROUPS: dict[str, list[Command]] = {}
for one in documented.every():
    GROUPS.setdefault(str(one), []).append(one)


def why_parsed(command: Command) -> str:
    """Returns why a command is not run here; "" if it is."""
    text = " ".join(command.words)
    if "--help" in text:
        return ""
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
    if words[:2] == ["jaxlm", "import"]:
        words = [word.replace("--out=RUN", f"--out={folder}/run") for word in words]
    if words[:2] != ["jaxlm", "train"] or not run:
        return [*words, *(SHRUNK.get(words[1], []) if words[0] == "jaxlm" and run and "--help" not in str(words) else [])]
    words = [word.replace("data.dir=DIR", "data.dir=DATA") for word in words]
    if words[2] in ("RUN", "runs/quickstart"):
        shutil.copytree(words[2], folder / "run")
        more = [] if "--branch=decay" in words else [f"--config.train.steps={tiny_world.STEPS + 2}"]
        return [*words[:2], str(folder / "run"), *words[3:], *more]
    loaded = config_files.load(*_config_of(words))
    shape = tiny_world.PRETRAINING if loaded.program == "pretrain" and not loaded.origin else tiny_world.POSTTRAINING
    return [*words, *shape, f"--config.workdir={folder}/run"]


def _config_of(words: list[str]) -> tuple[str, list[str]]:
    """Returns (config, overrides) of a train command."""
    named = [word.removeprefix("--config=") for word in words[2:] if not word.startswith("--") or "--config=" in word]
    return named[0] if named else "quickstart", [w.removeprefix("--config.") for w in words if w.startswith("--config.")]


def script(words: list[str], monkeypatch) -> int:
    """Runs one of our scripts in this process; returns its exit code."""
    path = ROOT / next(word for word in words if word.startswith("scripts/"))
    monkeypatch.setattr(sys, "argv", [str(path), *words[words.index(f"scripts/{path.name}") + 1 :]])
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    return 0


@pytest.mark.scripts
@pytest.mark.parametrize("text", [text for text, group in GROUPS.items() if not why_parsed(group[0])])
def test_a_command_runs(world, text, tmp_path, monkeypatch):
    command = GROUPS[text][0]
    places = ", ".join(other.place for other in GROUPS[text])
    if command.script in SCRIPTS_OF_THE_LEADERBOARD:
        return  # below
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is a list?\n"))
    words = taken(command, tmp_path, run=True)
    for setting in command.environment:
        monkeypatch.setenv(*setting.split("=", 1))
    if command.script:
        assert script(words, monkeypatch) == 0, places
    else:
        assert words[0] == "jaxlm", f"{places}: in neither class: {text}"
        assert cli.main(words[1:]) == ENDS.get(text, 0), f"{places}: {text}"
