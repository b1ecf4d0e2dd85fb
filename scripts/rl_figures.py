"""Measures GRPO and PPO on a small model and two tasks of reasoning-gym: the table of docs/rl.md.

    pip install "jaxlm[rl]"
    python scripts/rl_figures.py runs/rl

A base of 3M parameters on docstrings and questions; SFT on the form of an answer, not on what is right: the letters of the
question in any order, which is right once in five; then GRPO and PPO from there, which find out what is right, and the same
SFT for as long as GRPO took. All are asked the same 500 questions, which no training saw, one answer each at temperature 1.
Runs that have ended are kept: the same command goes on.
"""

import argparse
import importlib
import inspect
import json
import os
import pathlib
import random
import subprocess
import sys
import time

OPTIONS = {
    "spell_backward": {"min_word_len": 3, "max_word_len": 3},
    "palindrome_generation": {"min_length": 4, "max_length": 5},
}
TASKS = ",".join(
    f"reasoning_gym:{name}" + "?" * bool(options) + "&".join(f"{key}={value}" for key, value in options.items())
    for name, options in OPTIONS.items()
)
QUESTIONS, EACH, SEED = 500, 12_000, 1_000_003  # that are asked; of each task for base and SFT, and their seed
MODULES = "argparse asyncio collections datetime decimal email functools http.client inspect itertools json logging os pathlib"
MODULES += " random re shutil socket statistics string subprocess tarfile textwrap threading typing unittest zipfile"
SILENT = {"train.eval_every_steps": 0, "sample.prompts": (), "log.every_steps": 20}
BASE = SILENT | {
    "model.n_layers": 4,
    "model.vocab_size": 512,
    "data.chat_tokens": True,
    "train.steps": 700,
    "train.batch_size": 8,
    "optim.warmup_steps": 20,
}
SFT = SILENT | {
    "train.steps": 900,
    "train.batch_size": 8,
    "train.seq_len": 256,
    "optim.lr": 1e-3,
    "replay.share": 0.0,
}
RL = {
    "reward.tasks": TASKS,
    "rollout.prompts": 8,
    "rollout.answers": 8,
    "rollout.max_new_tokens": 16,
    "train.batch_size": 8,
    "train.seq_len": 1088,
    "train.steps": 400,
    "train.eval_every_steps": 200,
    "eval.batch_size": QUESTIONS,
    "eval.max_batches": 1,
    "optim.lr": 1e-4,
    "policy.beta": 0.0,
    "log.every_steps": 10,
}
KINDS = {
    "grpo": {},
    "ppo": {
        "rollout.prompts": 64,
        "rollout.answers": 1,
        "policy.beta": 0.01,
        "policy.epochs": 2,
        "policy.minibatches": 2,
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=pathlib.Path, help="a folder for the runs")
    parser.add_argument("--kinds", default="grpo,ppo", help="which of them to train (default: both)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of PPO and GRPO")
    given = parser.parse_args()
    runs, more = given.runs, dict(word.split("=", 1) for word in given.set)
    runs.mkdir(parents=True, exist_ok=True)
    write(runs)
    train("quickstart", runs / "base", BASE | {"data.path": runs / "texts.jsonl"})
    train("sft", runs / "sft", SFT | {"origin": runs / "base", "data.path": runs / "form.jsonl"})
    for kind in filter(None, given.kinds.split(",")):
        train(kind, runs / kind, RL | KINDS[kind] | more | {"origin": runs / "sft"})
    if (runs / "grpo/ended").exists():
        seconds, per_step = (
            values(runs / "grpo", "wall_s")[-1],
            values(runs / "sft", "time/step_s")[-1] / SFT["train.steps"],
        )
        longer = {"train.steps": int(seconds / per_step), "origin": runs / "base", "data.path": runs / "form.jsonl"}
        train("sft", runs / "sft-longer", SFT | longer)
        train("grpo", runs / "sft-longer-asked", RL | more | {"origin": runs / "sft-longer", "train.steps": 1})
    table(runs)
    return 0


def train(config: str, run: pathlib.Path, settings: dict) -> None:
    """Trains to the end, unless the run has ended; stops the script where that fails."""
    if (run / "ended").exists():
        return
    if int(settings["train.steps"]) < 10:
        settings = settings | {"optim.warmup_steps": 0}
    words = [f"--config.{key}={value}" for key, value in settings.items()]
    command = [sys.executable, "-m", "jaxlm.main", f"--config={config}", f"--config.workdir={run}", *words]
    began, here = time.monotonic(), str(pathlib.Path(__file__).parent)
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))  # a reward may be a function of a script
    if subprocess.call(command, env=os.environ | {"PYTHONPATH": path}):
        sys.exit(f"{' '.join(command)} failed")
    (run / "ended").write_text(f"{time.monotonic() - began:.0f}")


def write(runs: pathlib.Path) -> None:
    """Writes what base and SFT learn from: docstrings and questions; questions with answers of the right form."""
    import reasoning_gym

    from jaxlm.train.rewards import tasks

    rng, chats = random.Random(0), []
    for name, options in OPTIONS.items():
        rows = reasoning_gym.create_dataset(name, seed=SEED, size=EACH, **options)
        for row in rows:
            if tasks.for_evaluation(row["question"]):
                continue
            answer = "".join(rng.sample(row["answer"], len(row["answer"])))
            chats.append((row["question"], f"<answer>{answer}</answer>"))
    rng.shuffle(chats)
    modules = [importlib.import_module(name) for name in MODULES.split()]
    named = [inspect.getdoc(found) for module in modules for found in vars(module).values() if callable(found)]
    texts = sorted({text for text in named if text}) + [f"{question} {answer}" for question, answer in chats]
    lines(runs / "texts.jsonl", [{"text": text} for text in texts])
    lines(runs / "form.jsonl", [{"prompt": question, "response": answer} for question, answer in chats])


def lines(path: pathlib.Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def values(run: pathlib.Path, name: str) -> list[float]:
    """Returns all values of a metric, in order."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [row[name] for row in rows if name in row]


def table(runs: pathlib.Path) -> None:
    """Prints what has been measured. The best constant answer is in the first lines of a run, and in its log.txt."""
    print(f"{'model':24} {'reward':>8} {'KL':>8} {'explained':>10} {'minutes':>8}")
    for kind in KINDS:
        if not (run := runs / kind).joinpath("ended").exists():
            continue
        print(f"{'SFT on the form':24} {values(run, 'val/reward')[0]:8.3f}")
        reward, kl = values(run, "val/reward")[-1], values(run, "train/kl")[-1]
        explained = f"{values(run, 'train/explained_variance')[-1]:10.3f}" if kind == "ppo" else f"{'':10}"
        print(f"{kind:24} {reward:8.3f} {kl:8.3f} {explained} {values(run, 'wall_s')[-1] / 60:8.1f}")
    if (runs / "sft-longer-asked/ended").exists():
        print(f"{'SFT, as long as GRPO':24} {values(runs / 'sft-longer-asked', 'val/reward')[0]:8.3f}")


if __name__ == "__main__":
    sys.exit(main())
