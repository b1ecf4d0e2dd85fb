"""The command line as a new user meets it: help, typos, exit codes; one line, never a traceback."""

import ast
import pathlib
import re
import subprocess
import sys

import pytest

from jaxlm import cli, config, config_files
from jaxlm.config import ConfigError, RunError

ROOT = pathlib.Path(__file__).resolve().parents[1]


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = cli.main(list(argv))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_help_lists_every_verb_and_every_shipped_config(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for name in [*cli.VERBS, *config_files.shipped_configs()]:
        assert f"  {name}" in out


def test_help_lists_the_keys_of_a_verb_first(capsys):
    with pytest.raises(SystemExit):
        cli.main(["prepare", "--help"])
    keys = re.findall(r"^  --config\.(\w+)\.", capsys.readouterr().out, re.M)
    assert list(dict.fromkeys(keys))[:2] == ["data", "prepare"]


@pytest.mark.parametrize("verb", list(cli.VERBS))
def test_each_help_explains_every_key(capsys, verb):
    with pytest.raises(SystemExit) as stop:
        cli.main([verb, "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    base = config_files.load("base")
    keys = {k for k in config_files._flat_keys(base) if not hasattr(config_files._lookup(base, k), "items")}
    assert keys | {"data.sources", "prepare.sources"} == {key for key, _, _ in cli._keys()}
    for key, default, _ in cli._keys():
        assert f"--config.{key}  ({default})" in out
        if key not in ("data.sources", "prepare.sources"):
            assert ast.literal_eval(default.replace("_000", "000")) == config_files._lookup(base, key), key


def test_every_verb_has_a_program():
    for verb in cli.VERBS.values():
        names = cli.PROGRAMS.values() if verb.module is None else [verb.module]
        assert all((ROOT / "jaxlm/programs" / f"{name}.py").is_file() for name in names)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian"], "no command 'trian'; did you mean train?"),
        (["train"], "no config: give --config=NAME"),
        (["train", "--config=quikstart"], "did you mean 'quickstart'?"),
        (["train", "--config=quickstart", "--config.modl.n_layers=3"], "did you mean config.model.n_layers?"),
        (["train", "--config=quickstart", "--config.train.steps"], "--config.train.steps needs a value"),
        (["train", "--config=quickstart", "--config.train.steps=ten"], "config.train.steps=ten: expected int"),
        (["train", "--config=quickstart", "--steps=3"], "did you mean --config.train.steps?"),
        (["train", "--config=quickstart", "--confg.x=3"], "unknown argument '--confg.x=3'"),
        (["train", "--config=quickstart"], "no folder for this run: give --config.workdir=DIR"),
        (["train", "--config=quickstart", "--config.program=sfft"], "choose one of pretrain"),
        (["sample"], "the --config.workdir=DIR of a run"),
        (["trace", "--config=quickstart"], "--step"),
        (["trace", "--config=quickstart", "--step=x"], "invalid int value: 'x'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, argv, message):
    code, out, err = run(capsys, *argv)
    assert code == 2
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_values_may_stand_apart(capsys):
    code, _, err = run(capsys, "train", "--config", "quickstart", "--config.train.steps", "ten")
    assert (code, "config.train.steps=ten: expected int" in err) == (2, True)


@pytest.mark.parametrize(
    ("verb", "error", "code"),
    [
        ("train", ConfigError("bad"), 2),
        ("train", RunError("broken"), 1),
        ("train", KeyboardInterrupt(), 4),
        ("plan", KeyboardInterrupt(), 1),  # nothing is saved that a launcher could go on from
    ],
)
def test_errors_become_exit_codes(capsys, monkeypatch, verb, error, code):
    def fail(argv):
        raise error

    monkeypatch.setattr(cli, "_run", fail)
    found, _, err = run(capsys, verb)
    assert (found, "the same command goes on" in err) == (code, code == 4)


def test_a_reader_that_has_enough_is_no_error():
    command = f"{sys.executable} -m jaxlm.cli --help | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_verbs_that_read_a_run_take_its_own_config(tmp_path):
    c = config.resolve(config_files.load("quickstart", [f"workdir={tmp_path}", "train.steps=777"]))
    (tmp_path / "config.json").write_text(config.to_json(c))
    overrides = [f"workdir={tmp_path}", "sample.top_k=3"]
    read = cli._config(cli.VERBS["sample"], None, overrides)
    assert (read.train.steps, read.sample.top_k) == (777, 3)
    assert cli._config(cli.VERBS["train"], "quickstart", overrides).train.steps != 777


def test_main_is_jaxlm_train():
    done = subprocess.run(
        [sys.executable, "-m", "jaxlm.main", "--config=quickstart", "--config.lr=1"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (2, "jaxlm: unknown key config.lr; did you mean config.optim.lr?\n")


def test_training_imports_no_library_that_it_does_not_use():
    """tensorboardX imports PyTorch where there is one: seconds of every start."""
    code = "import sys, jaxlm.programs.pretrain; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "jaxlm.train.loop" in loaded
    assert not loaded & {"tensorboardX", "torch", "datatrove", "loguru", "duckdb", "resiliparse", "sklearn", "wandb"}
