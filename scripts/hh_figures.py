"""Measures PPO against a reward model of our own on Anthropic's HH: the second table of docs/rl.md.

    python scripts/hh_figures.py hh.jsonl runs/hh

hh.jsonl(.gz) has `chosen` and `rejected` transcripts. Trains a base of 2.7M parameters on their text, SFT on the chosen
answers, a reward model on the pairs, then PPO. Prints the scores of PPO and SFT, and PPO's cost: KL and length. Finished runs
are kept, so the same command continues after an interruption.

Last, GRPO gets a reward for each "very" in an answer: within 50 steps the run should warn that one word fills the answers.
"""

import argparse
import gzip
import json
import pathlib
import sys

from rl_figures import MODEL, SILENT, lines, train, values

LONGEST = 700  # characters of a transcript, so that prompts leave room
HELD_OUT = 128  # prompts for the measurement
SHAPE = SILENT | {"train.batch_size": 8, "train.seq_len": 256, "data.val_fraction": 0.1}
BASE = MODEL | SHAPE | {"model.vocab_size": 2048, "data.chat_tokens": True, "train.steps": 600}
SFT = SHAPE | {"train.steps": 200, "optim.lr": 1e-3, "replay.share": 0.0}
REWARD = SHAPE | {"train.steps": 200, "optim.lr": 2e-4, "train.eval_every_steps": 100}
PPO = SHAPE | {
    "rollout.prompts": 32,
    "rollout.answers": 1,
    "rollout.max_new_tokens": 48,
    "train.seq_len": 1024,
    "train.steps": 100,
    "train.eval_every_steps": 50,
    "eval.max_examples": HELD_OUT,
    "policy.epochs": 2,
    "policy.minibatches": 2,
    "optim.lr": 1e-4,
    "log.every_steps": 10,
}
VERY = {
    "rollout.prompts": 8,
    "rollout.answers": 8,
    "policy.epochs": 1,
    "policy.minibatches": 1,
    "train.seq_len": 2048,
    "train.steps": 60,
    "optim.lr": 3e-4,
    "reward.function": "hh_figures:count_very",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pairs", type=pathlib.Path, help="a .jsonl or .jsonl.gz of HH")
    parser.add_argument("runs", type=pathlib.Path, help="a folder for the runs")
    given = parser.parse_args()
    runs, opened = given.runs, gzip.open if given.pairs.suffix == ".gz" else open
    runs.mkdir(parents=True, exist_ok=True)
    with opened(given.pairs, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    lines(runs / "texts.jsonl", [{"text": row[name]} for row in rows for name in ("chosen", "rejected")])
    lines(runs / "hh.jsonl", [row for row in rows if max(len(row["chosen"]), len(row["rejected"])) < LONGEST])
    pairs = {"data.path": runs / "hh.jsonl"}
    train("base", runs / "base", BASE | {"data.path": runs / "texts.jsonl"})
    train("sft", runs / "sft", SFT | pairs | {"origin": runs / "base"})
    train("reward", runs / "reward", REWARD | pairs | {"origin": runs / "sft"})
    train("ppo", runs / "ppo", PPO | pairs | {"origin": runs / "sft", "reward.model": runs / "reward"})
    train("grpo", runs / "very", PPO | VERY | pairs | {"origin": runs / "sft"})
    table(runs)
    return 0


def count_very(prompts: list[str], answers: list[str], **columns: list) -> list[float]:
    """Returns a reward that is easily hacked: how often each answer says "very"."""
    return [float(answer.lower().split().count("very")) for answer in answers]


def table(runs: pathlib.Path) -> None:
    ranked, ppo = values(runs / "reward", "val/accuracy"), runs / "ppo"
    print(f"held-out pairs that the reward model ranks right: {ranked[-1]:.3f}")
    print(f"{'model':8} {'score':>8} {'tokens':>8} {'KL':>8} {'explained':>10}")
    for name, place in (("SFT", 0), ("PPO", -1)):
        score, tokens = (values(ppo, f"val/{figure}")[place] for figure in ("reward", "answer_tokens"))
        told = (
            [f"{values(ppo, f'train/{figure}')[-1]:8.3f}" for figure in ("kl", "explained_variance")] if place else []
        )
        print(f"{name:8} {score:8.3f} {tokens:8.1f} {'   '.join(told)}")


if __name__ == "__main__":
    sys.exit(main())
