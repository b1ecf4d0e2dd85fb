"""Makes chats, and pairs with an artificial preference, from prompts and responses: the data of docs/finetuning.md.

    python scripts/posttrain_data.py dolly.jsonl data/posttrain

Writes `chats.jsonl` and `chats_held_out.jsonl` (the last 100 rows), and three kinds of pairs, each with a held-out file with
correct labels. A share of the training labels is swapped (`--flip`), like errors of human labellers.

    answer      chosen: the answer; rejected: the answer with its words shuffled within each sentence
    shuffled    the opposite of `answer`, which the base model's likelihood alone gets wrong
    other       chosen: the answer; rejected: another prompt's answer
"""

import argparse
import json
import pathlib
import random
import re

HELD_OUT = 100
INSTRUCTION = re.compile(r"### Instruction:\n(.*)\n\n### Response:\n", re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=pathlib.Path, help="jsonl with prompt and response")
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--flip", type=float, default=0.2, help="the share of training labels that are swapped")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in given.source.read_text("utf-8").splitlines()]
    chats = [(without_wrapper(row["prompt"]), row["response"].strip()) for row in rows]
    kinds = {
        "answer": lambda i: (chats[i][1], in_another_order(chats[i][1], random.Random(i))),
        "shuffled": lambda i: (in_another_order(chats[i][1], random.Random(i)), chats[i][1]),
        "other": lambda i: (chats[i][1], chats[i - 1][1]),
    }
    parts = {"": range(len(chats) - HELD_OUT), "_held_out": range(len(chats) - HELD_OUT, len(chats))}
    for suffix, part in parts.items():
        write(given.out / f"chats{suffix}.jsonl", [messages(*chats[i]) for i in part])
        for name, of in kinds.items():
            swapped = set() if suffix else set(random.Random(0).sample(part, round(given.flip * len(part))))
            pairs = [(chats[i][0], of(i)[:: -1 if i in swapped else 1]) for i in part]
            lines = [{"prompt": prompt, "chosen": a, "rejected": b} for prompt, (a, b) in pairs if a != b]
            write(given.out / f"{name}{suffix}.jsonl", lines)


def without_wrapper(prompt: str) -> str:
    """Returns the instruction without the template around it."""
    found = INSTRUCTION.search(prompt)
    return (found.group(1) if found else prompt).strip()


def messages(prompt: str, answer: str) -> dict:
    return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}


def in_another_order(text: str, draw: random.Random) -> str:
    """Returns the text with the words of each sentence shuffled. Line breaks and the order of sentences stay."""
    lines = [re.split(r"(?<=[.!?]) +", line) for line in text.split("\n")]
    return "\n".join(" ".join(_shuffled(sentence, draw) for sentence in line) for line in lines)


def _shuffled(sentence: str, draw: random.Random) -> str:
    words = sentence.split(" ")
    draw.shuffle(words)
    return " ".join(words)


def write(path: pathlib.Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(rows):6,} {path}")


if __name__ == "__main__":
    main()
