"""A reward function that does what the answer says, for tests; items, and the config of a run with rewards."""

import pathlib

from jaxlm import config
from jaxlm.config import config_files
from jaxlm.train.rl.prompts import Item

FUNCTION = '''
"""Scores an answer by its length, unless the answer asks for something else."""
import itertools, math, os, re, sys, time
import numpy as np

def score(prompts, answers, answer=None, **others):
    for said in answers:
        if said == "raise":
            raise ValueError("no such\\n  thing")
        if said == "once" and not os.path.exists("once"):
            open("once", "w").close()
            raise OSError("the net is down")
        if said == "few":
            return [1.0] * (len(answers) - 1)
        if said == "many":
            return itertools.repeat(1.0)
        if said == "text":
            return "1.0"
        if said == "a dict":
            return dict.fromkeys(range(len(answers)), 1.0)
        if said == "sleep":
            time.sleep(600)
        if said == "regex":  # one call into C, which holds Python's lock
            re.match("(a+)+b", "a" * 64)
        if said == "os._exit":
            print("last words", flush=True)
            os._exit(7)
        if said == "sys.exit":
            sys.exit(3)
        if said == "signal":
            os.kill(os.getpid(), 11)
        if said == "huge":
            for _ in range(64):
                print("x" * 100_000)
        if said == "columns":
            return [-1.0 if a is None else float(a) for a in answer]
    values = {"nan": math.nan, "none": None, "large": 1e39, "a text": "1.0", "array": np.float32(5), "true": True}
    values["two"] = np.ones(2)
    return [values.get(said, float(len(said))) for said in answers]

def narrow(prompts, answers):
    return [0.0 for _ in answers]

number = 5
'''


def write(folder: pathlib.Path) -> None:
    """Writes the module `scores` with the function `score`."""
    (folder / "scores.py").write_text(FUNCTION)


def item(prompt: str = "2 + 2 =", place: str = "a.jsonl:1", **others) -> Item:
    return Item(({"role": "user", "content": prompt},), [], **{"columns": {}, "place": place} | others)


def make_config(*overrides: str) -> config.Config:
    """The config of a GRPO run whose prompts may have 96 tokens, four of them a step."""
    keys = ["workdir=w", "data.val_fraction=0.2", "train.seq_len=512", "train.batch_size=2"]
    keys += ["rollout.prompts=4", "rollout.answers=2", "rollout.max_new_tokens=32"]
    return config.resolve(config_files.load("base", [*keys, *overrides]))
