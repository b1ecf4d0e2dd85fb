"""The scripts that the leaderboard names run, by their own --smallest."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import documented
import pytest
from documented import ROOT

NEEDS = {
    "--peer=hf": "transformers",
    "peers": "transformers",
    "datatrove": "spacy",
    "scripts/rl_figures.py": "reasoning_gym",
}


@pytest.mark.scripts
@pytest.mark.parametrize("command", documented.with_new_words(documented.by_smallest().values()), ids=str)
def test_a_script_of_the_leaderboard_runs(command, tmp_path_factory):
    text = documented.without_numbers(command)
    if missing := [name for word, name in NEEDS.items() if word in text.split() and not importlib.util.find_spec(name)]:
        pytest.skip(f"{text} needs {missing[0]}")
    words = [str(ROOT / word) if word.startswith("scripts/") else word for word in text.split()[1:]]
    # One folder for all: of two commands on the same runs the second one goes on with what is there.
    folder = tmp_path_factory.getbasetemp() / "leaderboard"
    folder.mkdir(exist_ok=True)
    if "report" in words:
        words.append(f"--runs={ROOT / 'dev/runs.jsonl'}")
    assert run(folder, *words, "--smallest") == "", f"{command.place}: {text}"


def test_too_few_steps_are_refused_in_a_line(tmp_path):
    said = run(tmp_path, str(ROOT / "scripts/bench_overhead.py"), "--steps=4")
    assert "--steps=4 must be at least 6" in said
    assert "Traceback" not in said


def run(folder: pathlib.Path, *words: str) -> str:
    """Returns "" if a script ends well in a folder, else the end of what it said."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else (done.stdout + done.stderr)[-2000:]
