"""Tab completes verbs, configs, runs, options, keys and their values, by argcomplete's protocol, without JAX."""

import os
import pathlib
import subprocess
import sys

import pytest
from documented import ROOT

from jaxlm.cli import completion


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The current folder, with a run two levels deep and one beside it, and a folder that is none."""
    for name in ("runs/quick brown", "runs/b", "old", "data/mine"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("runs/quick brown", "runs/b", "old"):
        (tmp_path / name / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "prefix", "texts"),
    [
        ([], "tr", ["train", "trace"]),
        (["help"], "conf", ["configs"]),
        (["train"], "speed", ["speed_1b", "speed_35m"]),
        (["sample"], "ru", ["runs/quick brown", "runs/b"]),
        (["diff", "old"], "quick", []),  # the second is a run
        (["prepare"], "da", ["data/"]),
        (["export", "old"], "--c", ["--checkpoint=", "--config.", "--config="]),
        (["export", "old"], "--js", ["--json"]),
        (["export", "old"], "--to=", ["--to=hf", "--to=gguf", "--to=peft"]),
        (["train"], "--config=local", ["--config=local_35m"]),
        (["train"], "--config.optim.warm", ["--config.optim.warmup_steps="]),
        (["train"], "--config.mesh", [f"--config.mesh.{axis}=" for axis in ("data", "fsdp", "tensor", "context")]),
        (["train"], "--config.origin=runs/q", ["--config.origin=runs/quick brown"]),
        (["train"], "--config.data.dir=data/", ["--config.data.dir=data/mine/"]),
        (["train"], "--config.modl", []),
        (["trian"], "qu", []),
    ],
)
def test_what_may_stand_there(words, prefix, texts):
    found = [text for text in completion.completions(words, prefix) if text.startswith(prefix)]  # as argcomplete does
    assert sorted(found) == sorted(texts)


def test_a_level_of_sections_is_shown_at_a_time():
    top = completion.completions(["train"], "--config.")
    assert {"--config.train.", "--config.seed="} <= {*top}
    assert len(top) < 50
    assert completion.completions(["train"], "--config.see") == {"--config.seed=": top["--config.seed="]}


def by_protocol(line: str, folder: pathlib.Path) -> list[str]:
    """Returns what `jaxlm` answers to a shell: the words of file descriptor 8."""
    program = "import sys; from jaxlm import main; code = main.console_script()"
    environment = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "|"}
    answer = folder / "answer"
    command = f'exec 8>"{answer}"; exec "$0" -X importtime -c "$1"'
    done = subprocess.run(
        ["bash", "-c", command, sys.executable, program],
        env=os.environ | environment | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr[-500:]
    imported = {words.rpartition("|")[2].strip() for words in done.stderr.splitlines()}
    assert "jaxlm.cli.completion" in imported
    assert not {"jax", "numpy", "jaxlm.cli.cli"} & imported
    return answer.read_text().split("|")


def test_a_shell_is_answered_without_jax(tmp_path):
    assert by_protocol("jaxlm train quickstart --config.train.b", tmp_path) == ["--config.train.batch_size="]
    assert by_protocol("jaxlm report runs/b ru", tmp_path) == ["runs/b", "runs/quick\\ brown"]


def test_bash_completes_by_the_line_that_readme_gives(tmp_path):
    """In bash itself: the function that the line registers fills COMPREPLY."""
    (line,) = [text for text in (ROOT / "README.md").read_text().split("`") if text.startswith("eval ")]
    register = f'"{sys.executable}" -m argcomplete.scripts.register_python_argcomplete'
    jaxlm = tmp_path / "jaxlm"
    jaxlm.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "import jaxlm.main as m; m.console_script()"\n')
    jaxlm.chmod(0o755)
    script = f"""
        register-python-argcomplete() {{ {register} "$@"; }}
        {line}
        COMP_LINE="jaxlm export old --to=h" COMP_POINT=23 COMP_TYPE=9
        set -- $(complete -p jaxlm)
        while [ "$1" != -F ]; do shift; done
        "$2" jaxlm h =
        printf "%s\\n" "${{COMPREPLY[@]}}"
    """
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "hf", done.stderr
