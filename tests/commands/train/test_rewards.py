"""PPO and GRPO, from the command to what they leave behind."""

import json

import pytest
import tiny_chats
from tiny_keys import keys, words

from jaxlm.cli import cli
from jaxlm.run import metrics

SMALL = keys("""
    train.steps=3 train.batch_size=16 train.seq_len=64 train.eval_every_steps=3 rollout.prompts=4 rollout.answers=4
    rollout.max_new_tokens=8 policy.mask_truncated=False eval.max_examples=8 optim.warmup_steps=0 optim.lr=0.001
    runs.supervise=off log.tensorboard=False data.val_fraction=0.2
""")
REWARDS = """
import os, pathlib

def length(prompts, answers, **columns):
    return [len(answer) / 10 for answer in answers]

def fails_later(prompts, answers, **columns):
    if pathlib.Path(__file__).with_name("now").exists():
        raise ValueError("no GPU for the judge")
    return length(prompts, answers)
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tiny_chats.base(tmp_path_factory.mktemp("base"), n_layers=1)
    lines = [{"prompt": f"{i} one two", "level": i} for i in range(40)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def command(base, tmp_path, monkeypatch):
    """A function that trains: (kind, **keys) -> exit code. Rewards are in a module of the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny_rewards.py").write_text(REWARDS)

    def train(kind, **changed):
        given = SMALL | {"origin": base, "data.path": base / "prompts.jsonl", "workdir": tmp_path / "run"}
        given |= {name.replace("__", "."): value for name, value in changed.items()}
        return cli.main(["train", kind, *(f"--config.{key}={value}" for key, value in given.items())])

    return train


def test_grpo(command, tmp_path):
    keys = {"reward__function": "tiny_rewards:fails_later"}
    assert command("grpo", **keys) == 0
    run = tmp_path / "run"
    found, said = metrics.read(run / "metrics.jsonl"), (run / "log.txt").read_text()
    names = words("reward kl entropy clip_share flat_groups truncated unique answer_tokens sampler_gap")
    for step in (1, 2, 3):
        assert {f"train/{name}" for name in names} <= found[step].keys()
        lines = [json.loads(line) for line in (run / f"rollouts/{step}.jsonl").read_text().splitlines()]
        assert len(lines) == 16
        assert found[step]["train/reward"] == pytest.approx(sum(line["reward"] for line in lines) / 16)
        assert all(line["reward"] == pytest.approx(len(line["answer"]) / 10) for line in lines)
    assert found[1]["train/kl"] == pytest.approx(0, abs=1e-5)
    assert found[3]["train/kl"] > 0
    assert {"val/reward", "val/ended"} <= found[0].keys() & found[3].keys()
    assert "a loss of about 0.0 is normal here" in said
    assert "reward 0." in said or "reward 1." in said
    assert found[3]["time/rollout_s"] > 0
    assert command("grpo", **keys) == 0
    assert "complete" in (run / "log.txt").read_text()
    # A reward that fails keeps what was learnt, and the same command goes on.
    (tmp_path / "now").touch()
    assert command("grpo", **keys, train__steps=4) == 1
    said = (run / "log.txt").read_text()
    assert "no batch at step 4: reward.function=tiny_rewards:fails_later" in said
    assert "ValueError: no GPU for the judge" in said
    assert "prompts.jsonl:" in said
    (tmp_path / "now").unlink()
    assert command("grpo", **keys, train__steps=4) == 0
    assert "resuming at step 3" in (run / "log.txt").read_text()


def test_grpo_by_adapter_compares_with_the_frozen_part(command, tmp_path):
    keys = {"adapter__kind": "lora", "adapter__rank": 2, "adapter__without_rows": True, "policy__beta": 0.1}
    assert command("grpo", **LENGTH, **keys) == 0
    found = metrics.read(tmp_path / "run/metrics.jsonl")
    assert found[1]["train/kl"] == pytest.approx(0, abs=1e-5)
    assert found[3]["train/kl"] > 0


def test_ppo_by_a_reward_model(command, base, tmp_path):
    tiny_chats.pairs(tmp_path / "pairs.jsonl", 40)
    keys = {"data__path": tmp_path / "pairs.jsonl", "workdir": tmp_path / "rm", "train__seq_len": 192}
    assert command("reward", sample__prompts="()", train__steps=2, **keys) == 0
    keys = {"reward__model": tmp_path / "rm", "policy__value_from": "reward", "policy__kl_target": 0.1}
    assert command("ppo", policy__epochs=2, policy__minibatches=2, **keys) == 0
    found = metrics.read(tmp_path / "run/metrics.jsonl")
    names = {"value_loss", "explained_variance", "beta", "kl", "reward", "ratio_kl"}
    assert {f"train/{name}" for name in names} <= found[3].keys()
    assert found[1]["train/beta"] == pytest.approx(0.05)
    assert found[3]["train/beta"] < found[2]["train/beta"] < 0.05  # the KL is below its target
    assert found[1]["train/explained_variance"] != 0  # the head begins as the reward model's


LENGTH = {"reward__function": "tiny_rewards:length"}


@pytest.mark.parametrize(
    ("kind", "keys", "said"),
    [
        ("grpo", {}, "grpo needs a reward: --config.reward.tasks=reasoning_gym:chain_sum"),
        ("grpo", {"reward__function": "tiny_rewards:lenght"}, "lenght"),
        ("grpo", LENGTH | {"rollout__answers": 1, "rollout__prompts": 16}, "at least 2"),
        ("ppo", {"reward__model": "nowhere"}, "nowhere"),
        ("ppo", {"reward__tasks": "reasoning_gym:countdown"}, "--config.reward.run_code=True allows it"),
        ("grpo", LENGTH | {"rollout__max_new_tokens": 64}, "leaves no room"),
    ],
)
def test_what_can_not_be_is_one_line(command, capsys, kind, keys, said):
    assert command(kind, **keys) == 2
    assert said in "".join(capsys.readouterr())
