"""Times SFT or DPO and TRL's trainers alternately, on the same model and the same examples.

    jaxlm export RUN --to=hf --dtype=f32 --out=HF_DIR        # RUN: an SFT run, so that it has a chat template
    python scripts/bench_posttrain.py sft RUN HF_DIR chats.jsonl
    python scripts/bench_posttrain.py dpo RUN HF_DIR pairs.jsonl

All parameters are trained in float32. TRL's trainer runs in its own process: SFT padded, and packed; DPO padded, with the
reference's log-probabilities computed beforehand, as ours are. All sides step in turn, so that all meet the same noise; reading
and collating a batch are not timed. Steps differ in size, so the figure is tokens of text (without padding) per second: the
median over steps, and the ratio pair by pair.
"""

import argparse
import dataclasses
import multiprocessing
import os
import pathlib
import statistics
import tempfile
import time
import typing

ARMS = {"sft": ({}, {"packing": True}), "dpo": ({},)}  # the settings of TRL's trainer, one process each
Turn = typing.Callable[[], float]  # takes a step; returns tokens of text per second


def ours(kind: str, given: argparse.Namespace, folder: str) -> Turn:
    """Returns a function that takes a step of ours."""
    import jax

    from jaxlm import config
    from jaxlm.commands.train import posttraining
    from jaxlm.commands.train.kind import Ready
    from jaxlm.config import config_files
    from jaxlm.devices import processes, sharding
    from jaxlm.interop import inherit
    from jaxlm.models import hardware

    settings = {"origin": given.run, "data.path": given.examples, "workdir": folder, "replay.share": 0.0}
    settings |= {"train.batch_size": given.batch, "train.seq_len": given.length, "data.val_fraction": 0.01}
    overrides = [f"{key}={value}" for key, value in settings.items()]
    asked = config_files.load(kind, overrides)
    inherit.take(asked, overrides, print)
    c = config.resolve(asked)
    mesh = processes.start(c.hardware, c.distributed, c.mesh, c.model.dtype)
    c = dataclasses.replace(c, model=hardware.for_platform(c.model, jax.devices()[0].platform, c.mesh.context))
    training = {"sft": posttraining.Chats, "dpo": posttraining.Pairs}[kind](c)
    ready = Ready(c, training.parts(c, mesh), training.data(c))
    state, frozen = ready.parts.create(training.origin(c))
    ready = training.begin(ready, state, frozen)
    taken, step = 0, None

    def turn() -> float:
        nonlocal state, step, taken
        batch, taken = ready.data.batch(taken), taken + 1
        tokens = int((batch["segment_ids"] > 0).sum())
        on_device = sharding.to_global(batch, mesh, given.batch)
        with jax.set_mesh(mesh):
            step = step or ready.parts.jit().lower(frozen, state, on_device).compile()
        began = time.perf_counter()
        state, metrics = step(frozen, state, on_device)
        jax.block_until_ready(metrics)
        return tokens / (time.perf_counter() - began)

    return turn


class Theirs:
    """TRL's trainer in its own process."""

    def __init__(self, kind: str, given: argparse.Namespace, settings: dict, folder: str):
        context = multiprocessing.get_context("spawn")
        self._line, other = context.Pipe()
        context.Process(target=_train, args=(other, kind, given, settings, folder), daemon=True).start()

    def __call__(self) -> float:
        self._line.send(None)
        return self._line.recv()


def _train(line, kind: str, given: argparse.Namespace, settings: dict, folder: str) -> None:
    """Trains with TRL, one step for each request."""
    import datasets
    import transformers
    import trl

    class InTurns(transformers.TrainerCallback):
        """Waits for its turn before a step."""

        def on_step_begin(self, *args, **kwargs):
            try:
                line.recv()
            except EOFError:  # the other side has finished
                os._exit(0)
            self.began = time.perf_counter()

        def on_step_end(self, *args, **kwargs):
            line.send(tokens.pop(0) / (time.perf_counter() - self.began))

    common = {"output_dir": folder, "use_cpu": True, "bf16": False, "report_to": [], "gradient_checkpointing": False}
    common |= {"per_device_train_batch_size": given.batch, "max_length": given.length, "max_steps": 10**6}
    common |= {"save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True, "seed": 1}
    own = {"sft": {"assistant_only_loss": True}, "dpo": {"precompute_ref_log_probs": True}}[kind]
    made, args = {"sft": (trl.SFTTrainer, trl.SFTConfig), "dpo": (trl.DPOTrainer, trl.DPOConfig)}[kind]
    trainer = made(
        model=transformers.AutoModelForCausalLM.from_pretrained(given.hf, dtype="float32"),
        args=args(**common, **own, **settings),
        train_dataset=datasets.load_dataset("json", data_files=given.examples, split="train"),
        processing_class=transformers.AutoTokenizer.from_pretrained(given.hf),
        callbacks=[InTurns()],
    )
    collate, tokens = trainer.data_collator, []

    def counted(rows: list) -> dict:
        batch = collate(rows)
        seen = batch.get("attention_mask")
        tokens.append(int(seen.sum() if seen is not None else batch["input_ids"].numel()))
        return batch

    trainer.data_collator = counted
    trainer.train()


def main() -> None:
    """Prints each side's tokens of text per second, and the ratio of ours to each of TRL's, pair by pair."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=list(ARMS))
    parser.add_argument("run", help="a run of sft, from which ours begins")
    parser.add_argument("hf", help="its export, from which TRL's begins")
    parser.add_argument("examples", help="jsonl: `messages`, or `prompt`, `chosen`, `rejected`")
    parser.add_argument(
        "--batch", type=int, default=8, help="our rows of --length tokens; TRL's texts, or rows, or pairs"
    )
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=9, help="timed steps of each")
    given = parser.parse_args()
    given.run, given.hf, given.examples = (
        str(pathlib.Path(p).resolve()) for p in (given.run, given.hf, given.examples)
    )
    with tempfile.TemporaryDirectory() as folder:
        sides: dict[str, Turn] = {"jaxlm": ours(given.kind, given, f"{folder}/run")}
        for settings in ARMS[given.kind]:
            words = "".join(f" {key}" for key in settings) or " padded"
            sides[f"trl{words}"] = Theirs(given.kind, given, settings, f"{folder}/trl{words}")
        for side in sides.values():
            side(), side()  # the first steps take longer
        speeds = {name: [] for name in sides}
        for _ in range(given.steps):
            for name, side in sides.items():
                speeds[name].append(side())
    for name, found in speeds.items():
        quotients = [a / b for a, b in zip(speeds["jaxlm"], found, strict=True)]
        words = " ".join(f"{x:.2f}" for x in quotients)
        print(f"{name}: {statistics.median(found):.0f} tokens/s (median of {given.steps})")
        print(f"jaxlm / {name}, pair by pair: {words}; median {statistics.median(quotients):.3f}")


if __name__ == "__main__":
    main()
