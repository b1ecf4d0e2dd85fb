"""Measures GRPO and PPO on a small model and two tasks of reasoning-gym: the table of docs/rl.md.

    pip install -e ".[rl]"
    python scripts/rl_figures.py runs/rl

Trains a base of 3M parameters on docstrings and questions, then SFT on the form of an answer, not on right answers: the letters
or words of a question in random order, which is right once in four or six. So both learn to copy. From there, GRPO and PPO
learn that the order must be reversed, and the same SFT continues for as long as GRPO took. All models answer the same 500
questions, unseen in training, once each at temperature 1. Finished runs are kept: the same command continues. `--smallest`
trains all of them for two steps, on a tiny model.
"""

import argparse
import importlib
import inspect
import json
import math
import os
import pathlib
import random
import statistics
import subprocess
import sys
import time

COPIED = {
    "spell_backward": {"min_word_len": 3, "max_word_len": 3},
    "word_sequence_reversal": {"min_words": 3, "max_words": 3},
}  # by base and first SFT
ASKED = COPIED | {"word_sequence_reversal": {"min_words": 2, "max_words": 3}}
TASKS = ",".join(
    f"reasoning_gym:{name}?" + "&".join(f"{key}={value}" for key, value in options.items())
    for name, options in ASKED.items()
)
QUESTIONS, EACH, SEED = 500, 12_000, 1_000_003  # in the measurement; of each task for base and SFT; their seed
MODULES = "argparse asyncio collections datetime decimal email functools http.client inspect itertools json logging os pathlib"
MODULES += " random re shutil socket statistics string subprocess tarfile textwrap threading typing unittest zipfile"
SILENT = {"train.eval_every_steps": 0, "sample.prompts": (), "log.every_steps": 20}
MODEL = {  # shape, training and measurement
    "model.n_layers": 3,
    "model.d_model": 256,
    "model.n_heads": 4,
    "model.n_kv_heads": 2,
    "model.d_ff": 704,
    "eval.batch_size": 8,
    "eval.max_mb": 0.015,
    "eval.max_examples": 64,
    "optim.lr": 3e-3,
    "optim.warmup_steps": 20,
}
BASE = (
    SILENT
    | MODEL
    | {
        "model.n_layers": 4,
        "model.vocab_size": 448,
        "data.chat_tokens": True,
        "train.steps": 1200,
        "train.batch_size": 8,
        "train.seq_len": 256,
    }
)
SFT = SILENT | {
    "train.steps": 1500,
    "train.batch_size": 8,
    "train.seq_len": 256,
    "optim.lr": 1e-3,
    "replay.share": 0.0,
}
FORM = {"train.steps": 1000}
RL = {
    "reward.tasks": TASKS,
    "rollout.prompts": 8,
    "rollout.answers": 8,
    "rollout.max_new_tokens": 36,
    "train.batch_size": 8,
    "train.seq_len": 832,
    "train.steps": 400,
    "train.eval_every_steps": 200,
    "eval.max_examples": QUESTIONS,
    "optim.lr": 1.5e-4,
    "policy.beta": 0.0,
    "log.every_steps": 10,
}
KINDS = {
    "grpo": {},
    "ppo": {
        "rollout.prompts": 64,
        "rollout.answers": 1,
        "policy.beta": 0.01,
        "policy.epochs": 1,
        "policy.minibatches": 2,
        "policy.value_weight": 0.5,
        "optim.lr": 2e-4,
        "optim.schedule": "linear",
        "optim.final_lr_ratio": 0.0,
        "train.steps": 330,
    },
}  # 19 minutes each on two cores
SMALLEST = {"train.steps": 2, "log.every_steps": 1, "runs.supervise": "off", "log.tensorboard": False}
SMALLEST_RL = {"rollout.prompts": 4, "rollout.answers": 2, "rollout.max_new_tokens": 4, "train.seq_len": 256}
SMALLEST_RL |= {"eval.batch_size": 8, "eval.max_examples": 8, "train.eval_every_steps": 0}
SMALLEST_BASE = {"model.n_layers": 1, "model.d_model": 64, "model.d_ff": 64, "train.batch_size": 8}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=pathlib.Path, help="a folder for the runs")
    parser.add_argument("--kinds", default="grpo,ppo", help="which of them to train (default: both)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of PPO and GRPO")
    parser.add_argument("--smallest", action="store_true", help="a tiny model, two steps each: to see that it works")
    given = parser.parse_args()
    runs, more = given.runs, dict(word.split("=", 1) for word in given.set)
    base, less, each = BASE, {}, EACH
    if given.smallest:
        base, less, each, more = BASE | SMALLEST_BASE, SMALLEST, 100, more | SMALLEST | SMALLEST_RL
    runs.mkdir(parents=True, exist_ok=True)
    write(runs, each)
    train("base", runs / "base", base | less | {"data.path": runs / "texts.jsonl"})
    train("sft", runs / "copying", SFT | less | {"origin": runs / "base", "data.path": runs / "copied.jsonl"})
    form = {"origin": runs / "copying", "data.path": runs / "form.jsonl"}
    train("sft", runs / "sft", SFT | FORM | form | less)
    for kind in filter(None, given.kinds.split(",")):
        train(kind, runs / kind, RL | KINDS[kind] | more | {"origin": runs / "sft"})
    if (runs / "grpo/ended").exists():
        a_step = values(runs / "sft", "time/step_s")[-1] / FORM["train.steps"]
        as_long = {"train.steps": int(values(runs / "grpo", "wall_s")[-1] / a_step)}
        train("sft", runs / "sft-longer", SFT | FORM | form | as_long | less)
        train("grpo", runs / "sft-longer-asked", RL | more | {"origin": runs / "sft-longer", "train.steps": 1})
    table(runs)
    return 0


def train(config: str, run: pathlib.Path, settings: dict) -> None:
    """Trains to the end, unless the run has ended; exits if that fails."""
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


def write(runs: pathlib.Path, each: int) -> None:
    """Writes the data of base and SFT: docstrings and questions; `each` questions per task with answers in the right form."""
    copied = chats(COPIED, each)
    modules = [importlib.import_module(name) for name in MODULES.split()]
    named = [inspect.getdoc(found) for module in modules for found in vars(module).values() if callable(found)]
    texts = sorted({text for text in named if text}) + [f"{question} {answer}" for question, answer in copied]
    lines(runs / "texts.jsonl", [{"text": text} for text in texts])
    for name, found in (("copied", copied), ("form", chats(ASKED, each))):
        lines(runs / f"{name}.jsonl", [{"prompt": question, "response": answer} for question, answer in found])


def chats(options: dict[str, dict], each: int) -> list[tuple[str, str]]:
    """Returns questions of these tasks, without held-out ones, with the parts of each answer in random order."""
    import reasoning_gym

    from jaxlm.train.rl import prompts

    rng, found = random.Random(0), []
    for name, values in options.items():
        for row in reasoning_gym.create_dataset(name, seed=SEED, size=each, **values):
            if prompts.for_evaluation(row["question"]):
                continue
            comma = ", " if ", " in row["answer"] else ""
            parts = row["answer"].split(comma) if comma else list(row["answer"])
            found.append((row["question"], f"<answer>{comma.join(rng.sample(parts, len(parts)))}</answer>"))
    rng.shuffle(found)
    return found


def lines(path: pathlib.Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def values(run: pathlib.Path, name: str) -> list[float]:
    """Returns all values of a metric, in order, without undefined ones."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [row[name] for row in rows if row.get(name) is not None]


def table(runs: pathlib.Path) -> None:
    """Prints the results; KL is the mean over the last 50 steps, explained variance over all steps.

    The score of the best constant answer is in the first lines of a run, and in its log.txt.
    """
    print(f"{'model':24} {'reward':>8} {'KL':>8} {'explained':>10} {'minutes':>8}")
    for kind in KINDS:
        if not (run := runs / kind).joinpath("ended").exists():
            continue
        rewards, kl = values(run, "val/reward"), statistics.mean(values(run, "train/kl")[-5:] or [math.nan])
        variances = values(run, "train/explained_variance")
        explained = f"{statistics.mean(variances):10.3f}" if variances else f"{'':10}"
        print(f"{'SFT on the form':24} {rewards[0]:8.3f}")
        print(f"{kind:24} {rewards[-1]:8.3f} {kl:8.3f} {explained} {values(run, 'wall_s')[-1] / 60:8.1f}")
    if (runs / "sft-longer-asked/ended").exists():
        print(f"{'SFT, as long as GRPO':24} {values(runs / 'sft-longer-asked', 'val/reward')[0]:8.3f}")


if __name__ == "__main__":
    sys.exit(main())
