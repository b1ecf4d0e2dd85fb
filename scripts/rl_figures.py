"""Measures GRPO and PPO on a small model and two tasks of reasoning-gym: the table of docs/rl.md.

    pip install "jaxlm[rl]"
    python scripts/rl_figures.py runs/rl

A base of 3.7M parameters on the quickstart's texts; SFT that teaches the form of an answer and no more (its answers belong
to other questions); then GRPO and PPO from there, and the same SFT for as long as GRPO took. All are asked the same 500
questions, of seeds that no training saw. Runs that have ended are kept: the same command goes on.
"""

import argparse
import json
import pathlib
import random
import subprocess
import sys
import time

OPTIONS = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "products": {"min_digits": 1, "max_digits": 1},
}
TASKS = ",".join(
    f"reasoning_gym:{name}?" + "&".join(f"{key}={value}" for key, value in options.items())
    for name, options in OPTIONS.items()
)
QUESTIONS, CHATS = 500, 4000
BASE = {"model.n_layers": 4, "model.vocab_size": 2048, "data.chat_tokens": True, "train.steps": 300}
SFT = {
    "train.steps": 150,
    "train.batch_size": 8,
    "train.seq_len": 256,
    "train.eval_every_steps": 0,
    "optim.lr": 1e-3,
    "replay.share": 0.0,
    "sample.prompts": (),
}
RL = {
    "reward.tasks": TASKS,
    "rollout.prompts": 8,
    "rollout.answers": 8,
    "rollout.max_new_tokens": 8,
    "train.batch_size": 8,
    "train.seq_len": 512,
    "train.eval_every_steps": 100,
    "eval.batch_size": QUESTIONS,
    "eval.max_batches": 1,
    "optim.lr": 3e-4,
    "log.every_steps": 5,
}
KINDS = {
    "grpo": {"train.steps": 1000},
    "ppo": {"train.steps": 1000, "rollout.prompts": 64, "rollout.answers": 1, "policy.beta": 0.02},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=pathlib.Path, help="a folder for the runs")
    parser.add_argument("--kinds", default="grpo,ppo")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of PPO and GRPO")
    given = parser.parse_args()
    runs, more = given.runs, dict(word.split("=", 1) for word in given.set)
    runs.mkdir(parents=True, exist_ok=True)
    train("quickstart", runs / "base", BASE | {"sample.prompts": (), "train.eval_every_steps": 0})
    chats(runs / "form.jsonl")
    train("sft", runs / "sft", SFT | {"origin": runs / "base", "data.path": runs / "form.jsonl"})
    for kind in given.kinds.split(","):
        train(kind, runs / kind, RL | KINDS[kind] | more | {"origin": runs / "sft"})
    seconds = values(runs / "grpo", "wall_s")[-1]
    per_step = values(runs / "sft", "time/step_s")[-1] / SFT["train.steps"]
    longer = SFT | {"train.steps": int(seconds / per_step), "origin": runs / "base", "data.path": runs / "form.jsonl"}
    train("sft", runs / "sft-longer", longer)
    one = {"origin": runs / "sft-longer", "train.steps": 1}
    train("grpo", runs / "sft-longer-asked", RL | one)
    table(runs)
    return 0


def train(config: str, run: pathlib.Path, settings: dict) -> None:
    """Trains to the end, unless the run has ended; stops the script where that fails."""
    if (run / "ended").exists():
        return
    words = [f"--config.{key}={value}" for key, value in settings.items()]
    command = [sys.executable, "-m", "jaxlm.main", f"--config={config}", f"--config.workdir={run}", *words]
    began = time.monotonic()
    if subprocess.call(command):
        sys.exit(f"{' '.join(command)} failed")
    (run / "ended").write_text(f"{time.monotonic() - began:.0f}")


def chats(path: pathlib.Path) -> None:
    """Writes questions, each with the answer to another one: what is learnt from them is how answers look."""
    import reasoning_gym

    lines = []
    for name, options in OPTIONS.items():
        rows = reasoning_gym.create_dataset(name, seed=1_000_003, size=CHATS // len(OPTIONS), **options)
        questions, answers = [row["question"] for row in rows], [str(row["answer"]) for row in rows]
        random.Random(0).shuffle(answers)
        lines += [{"prompt": a, "response": b} for a, b in zip(questions, answers, strict=True)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def values(run: pathlib.Path, name: str) -> list[float]:
    """Returns all values of a metric, in order."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [row[name] for row in rows if name in row]


def table(runs: pathlib.Path) -> None:
    print(f"{'model':24} {'reward':>8} {'KL':>8} {'explained':>10} {'minutes':>8}")
    print(f"{'SFT on the form':24} {values(runs / 'grpo', 'val/reward')[0]:8.3f}")
    print(f"{'SFT, as long as GRPO':24} {values(runs / 'sft-longer-asked', 'val/reward')[0]:8.3f}")
    for kind in KINDS:
        if (run := runs / kind).joinpath("ended").exists():
            reward, kl = values(run, "val/reward")[-1], values(run, "train/kl")[-1]
            explained = f"{values(run, 'train/explained_variance')[-1]:10.3f}" if kind == "ppo" else f"{'':10}"
            minutes = values(run, "wall_s")[-1] / 60
            print(f"{kind:24} {reward:8.3f} {kl:8.3f} {explained} {minutes:8.1f}")


if __name__ == "__main__":
    sys.exit(main())
