"""Compares jaxlm's tokenizer with Hugging Face's byte-level BPE, trained on the same text to the same size.

    python scripts/measure_tokenizer.py --code=FOLDER --prose=FILE.jsonl.gz

FOLDER has Python packages, of which every eighth (by a hash of its name) is held out; of FILE every eighth text is. Each row:
the text that both trained on, the held-out text, our tokens over theirs, and MB/s of CPU time (of `encode_batch`, best of five)
with nothing remembered and with all words. To compare commits: `--mbps`, in turns, with PYTHONPATH set to each.
"""

import argparse
import gzip
import hashlib
import json
import pathlib
import random
import time

from jaxlm.data.tokenizer.ours import Tokenizer
from jaxlm.data.tokenizer.train import train_tokenizer

MOST = {"train": 8_000_000, "held out": 1_500_000}  # bytes of code
SIZES = 200, 100_000  # bytes of a file: larger ones are mostly tables of numbers


def code(folder: pathlib.Path) -> dict[str, list[str]]:
    texts, left = {"train": [], "held out": []}, dict(MOST)
    files = sorted(folder.rglob("*.py"))
    random.Random(0).shuffle(files)
    for file in files:
        package = file.relative_to(folder).parts[0]
        part = "train" if hashlib.md5(package.encode()).digest()[0] % 8 else "held out"
        if left[part] > 0 and SIZES[0] < file.stat().st_size < SIZES[1]:
            texts[part].append(file.read_text("utf-8", "replace"))
            left[part] -= file.stat().st_size
    return texts


def prose(file: pathlib.Path) -> dict[str, list[str]]:
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    return {"train": [text for i, text in enumerate(texts) if i % 8], "held out": texts[::8]}


def their_tokens(trained: list[str], size: int, held_out: dict[str, list[str]]) -> dict[str, int]:
    import tokenizers

    theirs, level = tokenizers.Tokenizer(tokenizers.models.BPE()), tokenizers.pre_tokenizers.ByteLevel
    theirs.pre_tokenizer = level(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, initial_alphabet=level.alphabet(), show_progress=False)
    theirs.train_from_iterator(trained, trainer)
    return {name: sum(len(coded.ids) for coded in theirs.encode_batch(texts)) for name, texts in held_out.items()}


def speeds(coder: Tokenizer, texts: list[str]) -> tuple[float, float]:
    n_bytes, cold, warm = sum(len(text.encode()) for text in texts), [], []
    for _ in range(5):
        coder = Tokenizer(coder.model_bytes)
        for seconds in (cold, warm):
            began = time.process_time()
            coder.encode_batch(texts)
            seconds.append(time.process_time() - began)
    return n_bytes / 1e6 / min(cold), n_bytes / 1e6 / min(warm)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--code", type=pathlib.Path)
    parser.add_argument("--prose", type=pathlib.Path)
    parser.add_argument("--sizes", default="8192,32768")
    parser.add_argument("--model", default="bpe", choices=("bpe", "unigram"))
    parser.add_argument("--mbps", action="store_true", help="without the comparison with Hugging Face")
    parser.add_argument("--smallest", action="store_true", help="on this file alone: to see that it works")
    args = parser.parse_args()
    if args.smallest:
        args.sizes, texts = "500", [pathlib.Path(__file__).read_text()] * 8
        kinds = {"code": {"train": texts, "held out": texts[:1]}}
    elif args.code and args.prose:
        kinds = {"code": code(args.code), "prose": prose(args.prose)}
    else:
        parser.error("give --code=FOLDER and --prose=FILE.jsonl.gz")
    held_out = {name: texts["held out"] for name, texts in kinds.items()}
    for trained, texts in kinds.items():
        for size in map(int, args.sizes.split(",")):
            began = time.perf_counter()
            coder = train_tokenizer(texts["train"], vocab_size=size, chat_tokens=False, model_type=args.model)
            seconds = time.perf_counter() - began
            theirs = {} if args.mbps else their_tokens(texts["train"], size, held_out)
            for name, measured in held_out.items():
                tokens, (cold, warm) = sum(map(len, coder.encode_batch(measured))), speeds(coder, measured)
                ratio = f"{tokens / theirs[name]:.3f} of theirs" if theirs else ""
                print(
                    f"trained on {trained:5} in {seconds:4.1f} s, {size:6} ids, {name:5}: {tokens:8,} tokens {ratio}, "
                    f"{cold:5.2f} MB/s cold, {warm:5.2f} warm",
                    flush=True,
                )


if __name__ == "__main__":
    main()
