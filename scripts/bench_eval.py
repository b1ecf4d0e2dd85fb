"""Times `jaxlm eval`'s scorer and lm-evaluation-harness's own `hf` model alternately, on the same requests.

    jaxlm export RUN --to=hf --out=HF_DIR
    python scripts/bench_eval.py RUN HF_DIR --data=BENCHMARKS --questions=48 --rounds=3

BENCHMARKS is laid out by scripts/hub_layout.py. The harness itself (prompts, metrics) is not timed, and both sides run the
same requests once to warm up. `hf` gets the best of several batch sizes. Prints each task's median ratio of paired times, the
largest difference of log p, and how many generated texts are equal. Export in float32 (--dtype=f32) to compare values.
"""

import argparse
import importlib.util
import pathlib
import statistics
import sys
import tempfile
import time

from jaxlm import config as config_lib
from jaxlm.config import config_files
from jaxlm.eval import likelihood, lm_harness, model, results

TASKS = (("arc_easy", 0), ("arc_easy", 5), ("piqa", 0), ("gsm8k", 0))


def ours(run: str) -> lm_harness.ScorerLM:
    """Returns the run's model as a model of the harness."""
    c = config_lib.resolve(config_files.from_run(pathlib.Path(run) / "config.json"))
    restored = model.restore(c, "latest")
    return lm_harness.ScorerLM(likelihood.of_restored(restored, c), "ours")


def requests_of(
    task_name: str, fewshot: int, data: str, cache: str, questions: int, new_tokens: int
) -> tuple[str, list]:
    """Returns (kind, requests) of some questions of a task."""
    task = lm_harness.load([task_name], data, fewshot, cache)[task_name][task_name]
    if task.OUTPUT_TYPE == "generate_until":
        kwargs = dict(task.config.generation_kwargs) | {"max_gen_toks": new_tokens}
        task.set_config(key="generation_kwargs", value=kwargs)
    chosen = results.spread(len(task.eval_docs), questions)
    task.build_all_requests(samples=chosen, rank=0, world_size=1)
    kind = "generate_until" if task.OUTPUT_TYPE == "generate_until" else "loglikelihood"
    return kind, task.instances


def timed(lm, kind: str, requests: list) -> tuple[float, list]:
    """Returns (seconds, answers)."""
    began = time.perf_counter()
    answers = getattr(lm, kind)(requests, disable_tqdm=True)
    return time.perf_counter() - began, answers


def fastest(lm, kind: str, requests: list, sizes: list[int]) -> int:
    """Returns the batch size with which `hf` is fastest."""
    seconds = {}
    for size in sizes:
        lm.batch_size_per_gpu = size
        seconds[size] = timed(lm, kind, requests)[0]
    return min(seconds, key=seconds.get)


def compare(kind: str, mine: list, theirs: list) -> str:
    """Returns a phrase that says how much the answers differ."""
    if kind == "generate_until":
        same = sum(a == b for a, b in zip(mine, theirs, strict=True))
        return f"{same} of {len(mine)} texts equal"
    gap = max(abs(a[0] - b[0]) for a, b in zip(mine, theirs, strict=True))
    greedy = sum(a[1] == b[1] for a, b in zip(mine, theirs, strict=True))
    return f"log p differs by at most {gap:.1e}, greedy equal in {greedy} of {len(mine)}"


def main() -> int:
    """Runs the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("hf")
    parser.add_argument("--data", required=True)
    parser.add_argument("--questions", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--sizes", default="1,8,16")
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0 = its own choice")
    parser.add_argument("--smallest", action="store_true", help="four questions, once: to see that it works")
    args = parser.parse_args()
    if args.smallest:
        args.questions, args.rounds, args.new_tokens, args.sizes = 4, 1, 2, "4"
    if not importlib.util.find_spec("torch"):
        parser.error("the peer is not installed: pip install -e '.[parity]'")
    import torch
    from lm_eval.models.huggingface import HFLM

    if args.threads:
        torch.set_num_threads(args.threads)
    lm, other = ours(args.run), HFLM(pretrained=args.hf, device="cpu", dtype="float32", batch_size=1)
    for name, fewshot in TASKS:
        count = max(4, args.questions // 6) if name == "gsm8k" else args.questions
        with tempfile.TemporaryDirectory() as cache:
            kind, requests = requests_of(name, fewshot, args.data, cache, count, args.new_tokens)
        size = fastest(other, kind, requests, [int(size) for size in args.sizes.split(",")])
        other.batch_size_per_gpu = size
        _, mine = timed(lm, kind, requests)
        quotients = []
        for _ in range(args.rounds):
            seconds, mine = timed(lm, kind, requests)
            their_seconds, theirs = timed(other, kind, requests)
            quotients.append((their_seconds / seconds, seconds, their_seconds))
        ratio, seconds, their_seconds = map(statistics.median, zip(*quotients, strict=True))
        spread = f"{min(quotients)[0]:.2f} to {max(quotients)[0]:.2f}"
        words = f"{ratio:.2f} times as fast ({spread}): {seconds:.2f} s, hf {their_seconds:.2f} s at batch size {size}"
        print(f"{name} {fewshot}-shot, {count} questions: {words}; {compare(kind, mine, theirs)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
