"""`jaxlm trace` shows the documents that a step of the run trained on."""

import json

import pytest
import tiny_data

from jaxlm.cli import cli


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny_data.make(tmp_path_factory.mktemp("data") / "d", {"a": 1.0})


def argv(data, workdir) -> list[str]:
    keys = {"workdir": workdir, "data.dir": data.path, "model.vocab_size": 300, "train.seq_len": 32}
    return ["trace", "quickstart", "--config.train.batch_size=2", *(f"--config.{k}={v}" for k, v in keys.items())]


def trace(capsys, data, workdir, step):
    assert cli.main([*argv(data, workdir), f"--step={step}", "--json"]) == 0
    return json.loads("[" + ",".join(capsys.readouterr().out.splitlines()) + "]")


def test_batches_that_the_run_passed_over_are_no_steps(capsys, data, tmp_path):
    plain, run = tmp_path / "plain", tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text(json.dumps({"starts": [], "passed_over": [[5, 6], [3, 3]]}))
    for step, batch in ((2, 2), (3, 4), (4, 7), (5, 8)):
        shown = trace(capsys, data, run, step)
        assert shown == trace(capsys, data, plain, batch)
        assert step == batch or shown != trace(capsys, data, plain, step)


def test_a_step_beyond_the_run_is_said(capsys, data, tmp_path):
    words = argv(data, tmp_path)
    assert cli.main([*words, "--step=461"]) == 2
    assert "--step=461: the run ends at step 460 (train.steps)" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text('{"step": 10}\n{"step": 20}\n')
    assert cli.main([*words, "--step=20"]) == 0
    assert "to come" not in capsys.readouterr().err
    assert cli.main([*words, "--step=21"]) == 0
    assert f"step 21 is still to come, {tmp_path} is at step 20: this" in capsys.readouterr().err
