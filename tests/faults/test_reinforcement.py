"""PPO and GRPO that are killed while answers are drawn: the same command goes on, to the bit, answers included."""

import json
import os
import signal
import time

import pytest

pytestmark = pytest.mark.faults
REWARDS = """
import pathlib
import time

HERE = pathlib.Path(__file__).parent

def letters(prompts, answers, **columns):
    (HERE / "asked").touch()
    time.sleep(0.15)  # steps of milliseconds would outrun the saves that are waited for
    while (HERE / "wait").exists():
        time.sleep(0.05)
    return [answer.count("e") - len(answer) / 50 for answer in answers]
"""
SIZES = {
    "train__steps": 12,  # whose answers take longer than the saves
    "rollout__prompts": 4,
    "rollout__answers": 4,
    "rollout__max_new_tokens": 12,
    "train__batch_size": 8,
    "train__seq_len": 96,
    "policy__mask_truncated": False,
    "optim__lr": 0.003,
}
KINDS = {
    "grpo": {"program": "grpo", "policy__beta": 0.05},
    "ppo": {
        "program": "ppo",
        "policy__epochs": 2,
        "policy__minibatches": 2,
        "policy__beta": 0.05,
        "policy__kl_target": 0.02,
    },
}


@pytest.fixture(scope="module")
def asked(place):
    """kind -> the options of its runs. Their reward is in a module on PYTHONPATH, which can be made to wait."""
    folder = place.root / "rewards"
    folder.mkdir()
    (folder / "waiting_rewards.py").write_text(REWARDS)
    path = place.root / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i} what is it?"}) + "\n" for i in range(50)))
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), before]))
    shared = {"origin": place.whole, "data__path": path, "reward__function": "waiting_rewards:letters", **SIZES}
    yield folder, {kind: shared | keys for kind, keys in KINDS.items()}
    os.environ["PYTHONPATH"] = before


def answers(run) -> dict[str, str]:
    return {path.name: path.read_text() for path in (run / "rollouts").glob("*.jsonl")}


@pytest.mark.parametrize("kind", KINDS)
def test_kill_9_in_the_middle_of_a_rollout_and_the_run_goes_on_to_the_bit(place, asked, kind):
    folder, options = asked
    place.run(f"{kind}-whole", **options[kind])
    started = place.start(kind, **options[kind])
    started.wait_for_saved(8)
    (folder / "wait").touch()
    (folder / "asked").unlink()
    started.wait_for(lambda: (folder / "asked").exists(), "the reward")
    started.kill()
    (folder / "wait").unlink()
    assert "resuming at step " in place.run(kind, **options[kind])
    place.assert_exact(kind, f"{kind}-whole")
    whole = answers(place.root / f"{kind}-whole")
    assert len(whole) == 12
    assert answers(place.root / kind) == whole


def test_ctrl_c_while_the_reward_waits_saves_what_was_learnt(place, asked):
    folder, options = asked
    started = place.start("interrupted", **options["grpo"])
    started.wait_for_step(5)
    (folder / "wait").touch()
    (folder / "asked").unlink(missing_ok=True)
    started.wait_for(lambda: (folder / "asked").exists(), "the reward")
    started.process.send_signal(signal.SIGINT)
    time.sleep(1)
    (folder / "wait").unlink()
    said = started.end(4)
    assert "interrupted, the state is saved" in said
    assert "resuming at step " in place.run("interrupted", **options["grpo"])
