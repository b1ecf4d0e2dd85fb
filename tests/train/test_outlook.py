"""What the forecast reads of a run."""

import json

from jaxlm import config
from jaxlm.config import config_files
from jaxlm.train import outlook


def losses(folder, *overrides: str):
    keys = ["data.dir=d", "train.steps=100", "optim.warmup_steps=0", *overrides]
    return outlook.of_run(folder, config.resolve(config_files.load("base", keys))).losses()


def test_the_losses_of_a_final_mixture_are_left_out(tmp_path):
    lines = [{"step": step, "train/loss": float(step)} for step in range(10, 101, 10)] + [{"step": 90, "val/loss": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    final = ("data.final.share=0.3", "data.final.weights.math=4")
    assert losses(tmp_path) == ([*range(10, 101, 10)], [float(step) for step in range(10, 101, 10)])
    assert losses(tmp_path, *final)[0] == [10, 20, 30, 40, 50, 60, 70]
    assert losses(tmp_path, *final, "optim.decay_at_step=45")[0] == [10, 20, 30, 40]
    (tmp_path / "run.json").write_text(json.dumps({"starts": [], "passed_over": [[11, 15]]}))
    assert losses(tmp_path, *final)[0] == [10, 20, 30, 40, 50, 60]  # step 66 has batch 71
