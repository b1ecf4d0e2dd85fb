"""What a training run says when it ends: after ctrl-C at the last evaluation no step is missing, and the line says so."""

import os
import signal

import tiny_data
from tiny_keys import keys

from jaxlm.cli import cli
from jaxlm.run import metrics
from jaxlm.train import hooks

TINY = keys("""
    model.n_layers=1 model.d_model=16 model.n_heads=2 model.d_ff=32 train.batch_size=8 train.seq_len=8 train.steps=1
    train.eval_every_steps=0 eval.max_mb=0.001 eval.at_start=False runs.supervise=off optim.warmup_steps=0
    log.tensorboard=False sample.prompts=()
""")


def test_ctrl_c_before_the_last_evaluation_loses_no_step(tmp_path, monkeypatch, capsys):
    tiny_data.make(tmp_path / "data", {"a": 1.0})
    given = TINY | {"workdir": tmp_path / "run", "data.dir": tmp_path / "data"}
    command = ["train", "base", *(f"--config.{name}={value}" for name, value in given.items())]
    save = hooks.Save.__call__

    def interrupted(self, moment):
        os.kill(os.getpid(), signal.SIGINT)
        return save(self, moment)

    with monkeypatch.context() as patch:
        patch.setattr(hooks.Save, "__call__", interrupted)
        assert cli.main(command) == 4
    line = "interrupted, all steps are done and saved, but not measured to the end: "
    assert f"{line}{tmp_path}/run; the same command goes on" in capsys.readouterr().err
    assert not metrics.held_out_losses(tmp_path / "run/metrics.jsonl", [])
    assert cli.main(command) == 0
    assert "\ndone: " in capsys.readouterr().err
    assert [*metrics.held_out_losses(tmp_path / "run/metrics.jsonl", [])] == [1]
