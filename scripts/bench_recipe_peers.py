"""`python scripts/bench_recipe.py peers`: bits per byte that others' settings reach on the same tokens and shape.

Each peer trains transformers' LlamaForCausalLM of our shape with transformers' Trainer on the batches of our runs, and is
measured on all held-out rows. In training and measurement it attends over whole rows, not documents, as users of the Trainer
do. It has our number of rows per step, whatever its own default is.

nanochat's settings are those of its base_train.py of July 2026 (github.com/karpathy/nanochat), with its own rules for batch,
width and length: Muon with Polar Express (arXiv:2505.16932), NorMuon (arXiv:2510.05491), equal rows (arXiv:2603.28254), its
norm restored (arXiv:2602.21545), cautious decay. nanochat's own model differs from ours (untied, value embeddings, zero
projections, ...): our tied embedding and norms get the learning rates of its head.
"""

import argparse
import dataclasses
import importlib.util
import json
import math
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import typing

import bench_recipe_arms as arms_lib
import bench_recipe_runs as runs_lib
import numpy as np
from bench_recipe_runs import Fields, Run

from jaxlm.config import ConfigError, config_files, resolve
from jaxlm.data.batches import document_rows
from jaxlm.data.shards import shards

NANOCHAT = "nanochat"  # in place of the Trainer's own arguments
PEERS: dict[str, typing.Any] = {
    "peer:hf": {},  # the Trainer's defaults: AdamW at 5e-5, b2 .999, no warm-up, no decay of weights, linear to 0
    "peer:hf_6e-4_cosine": {"learning_rate": 6e-4, "lr_scheduler_type": "cosine"},
    "peer:nanochat": NANOCHAT,
}
D12_TOKENS, D12_BATCH, D12_WIDTH = 12 * 110.1e6, 2**19, 768  # its rates are tuned for this: 12 tokens per parameter
WARMUP_STEPS, WARMDOWN, FINAL = 40, 0.65, 0.05
POLAR = (  # of arXiv:2505.16932, five steps
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def asked(run: Run) -> Fields:
    """Returns a peer's settings at a shape; empty if the peer or the shape is unknown."""
    if run.arm not in PEERS or run.shape not in arms_lib.SHAPES:
        return {}
    rows = {"batch": arms_lib.BATCH, "seq_len": arms_lib.SEQ_LEN}
    return {"peer": PEERS[run.arm]} | arms_lib.SHAPES[run.shape] | rows


def main(args: argparse.Namespace) -> int:
    """Runs the peers not yet finished at one budget, and appends their lines; returns exit code 1 if one failed."""
    if missing := [name for name in ("torch", "transformers", "accelerate") if not importlib.util.find_spec(name)]:
        raise ConfigError(f"the peers need {', '.join(missing)}: pip install -e '.[parity]'")
    failed, end = 0, time.monotonic() + 3600 * args.hours
    with runs_lib.lock(args.runs) as held:
        data = runs_lib.make_data(args.data, arms_lib.words(arms_lib.DATA), held)
        about = runs_lib.about(data, arms_lib.WEIGHTS, arms_lib.SEQ_LEN, arms_lib.BUDGETS[-1])
        done = runs_lib.finished(runs_lib.read(args.runs), asked, about["data"])
        todo = [Run(peer, "S0", args.tokens, seed) for seed in arms_lib.SEEDS for peer in args.only or PEERS]
        for run in (run for run in todo if run not in done):
            taken = args.tokens / arms_lib.ASSUMED[run.shape]
            if time.monotonic() + taken > end:
                print(f"{run} would not end within --hours={args.hours:g}")
                break
            try:
                line = measure(run, args.data, held)
            except ConfigError as error:
                failed += 1
                print(f"{run}: FAILED, {error}", flush=True)
                continue
            line = dataclasses.asdict(run) | {"asked": asked(run)} | line | about
            runs_lib.append(args.runs, line)
            print(f"{run}: {runs_lib.short(line)}", flush=True)
    return 1 if failed else 0


def measure(run: Run, data: pathlib.Path, held: typing.IO[bytes]) -> Fields:
    """Trains a peer in its own process; returns the figures for its line. Raises ConfigError if it failed."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="bench_recipe_peer_"))
    watch, began = runs_lib.Watch(), time.monotonic()
    work = dataclasses.asdict(run) | {"data": str(data), "folder": str(folder)}
    try:
        with (folder / "said.txt").open("wb") as said:
            command = [sys.executable, __file__, json.dumps(work)]
            code = subprocess.run(command, stdout=said, stderr=said, pass_fds=(held.fileno(),), check=False).returncode
        found = runs_lib.read(folder / "found.json")
        if code or not found:
            raise ConfigError(f"exit code {code}: {runs_lib.last_line(folder / 'said.txt')}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found[-1] | runs_lib.stamp(began, watch)


# ---------------------------------------------------------------------------------------------------------------------
# In the peer's own process


def child(work: Fields) -> None:
    """Trains and measures one peer, and writes its figures as a line of FOLDER/found.json."""
    import torch
    import transformers

    from jaxlm.interop import hf_config

    run = Run(**{field.name: work[field.name] for field in dataclasses.fields(Run)})
    data, folder, steps = shards.open_data(work["data"]), pathlib.Path(work["folder"]), arms_lib.steps_of(run.tokens)
    keys = arms_lib.COMMON | arms_lib.SHAPES[run.shape] | {"model.vocab_size": data.vocab_size}
    model_config = resolve(
        config_files.load("base", ["workdir=unused", "data.dir=unused", *arms_lib.words(keys)])
    ).model
    torch.manual_seed(run.seed)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**hf_config.content(model_config)))
    mine = PEERS[run.arm] == NANOCHAT
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=arms_lib.BATCH,
        max_steps=steps,
        seed=run.seed,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        **({"max_grad_norm": 0.0} if mine else PEERS[run.arm]),  # nanochat does not clip
    )
    optimizer = nanochat(model, steps, model_config.d_model) if mine else (None, None)
    trainer = transformers.Trainer(model, arguments, train_dataset=_rows(data, run.seed, steps), optimizers=optimizer)
    began = time.perf_counter()
    trainer.train()
    taken = time.perf_counter() - began
    found = held_out(model, data) | {"tokens_per_second": round(steps * arms_lib.BATCH * arms_lib.SEQ_LEN / taken)}
    found["versions"] = f"torch {torch.__version__}, transformers {transformers.__version__}"
    (folder / "found.json").write_text(json.dumps(found) + "\n")


def _rows(data: shards.DataDir, seed: int, steps: int) -> typing.Any:
    """Returns our batches' rows in order, each with one more token: the model shifts, so it has as many targets as we."""
    import torch

    order = document_rows.Rows(data, data.mixture, seed, arms_lib.SEQ_LEN, arms_lib.BATCH)

    class Rows(torch.utils.data.IterableDataset):
        def __iter__(self) -> typing.Iterator[dict]:
            for step in range(steps):
                batch = order.batch(step)
                for tokens, targets in zip(batch["tokens"], batch["targets"], strict=True):
                    ids = np.append(tokens, targets[-1]).astype(np.int64)
                    yield {"input_ids": ids, "labels": ids}

    return Rows()


def held_out(model: typing.Any, data: shards.DataDir) -> Fields:
    """Returns loss and bits per byte over all held-out rows, by source and on average, as our evaluation computes them."""
    import torch

    model.eval()
    losses, bits = {}, {}
    for source in data.mixture:
        nll, tokens, size = 0.0, 0, 0
        for held in document_rows.validation_rows(data, source, seq_len=arms_lib.SEQ_LEN, batch_size=arms_lib.BATCH):
            ids, targets = (
                torch.from_numpy(held.batch[name]).long().to(model.device) for name in ("tokens", "targets")
            )
            with torch.no_grad():
                logits = model(input_ids=ids).logits.float()
            each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
            nll += float((each.cpu() * torch.from_numpy(held.batch["weights"]).flatten()).sum(dtype=torch.float64))
            tokens, size = tokens + held.target_tokens, size + held.target_bytes
        losses[source], bits[source] = nll / tokens, nll / math.log(2) / size
    return {
        "loss": statistics.fmean(losses.values()),
        "bits_per_byte": statistics.fmean(bits.values()),
        "sources": losses,
    }


def nanochat(model: typing.Any, steps: int, width: int) -> tuple[typing.Any, typing.Any]:
    """Returns nanochat's (optimizer, learning rate schedule) for our model."""
    import torch

    by_batch = math.sqrt(arms_lib.BATCH * arms_lib.SEQ_LEN / D12_BATCH)
    decay = 0.28 * by_batch * D12_TOKENS / (steps * arms_lib.BATCH * arms_lib.SEQ_LEN)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
    others = [p for name, p in model.named_parameters() if not (p.ndim == 2 and ".layers." in name)]
    groups = [
        {"params": matrices, "kind": "muon", "lr": 0.02 * by_batch, "decay": decay},
        {"params": others, "kind": "adamw", "lr": 0.008 * by_batch / math.sqrt(width / D12_WIDTH), "decay": 0.01},
    ]

    class Nanochat(torch.optim.Optimizer):
        def __init__(self) -> None:
            super().__init__(groups, {})
            self._done = 0

        @torch.no_grad()
        def step(self, closure: typing.Any = None) -> None:
            momentum, decay_left = momentum_at(self._done, steps), 0.5 * (1 + math.cos(math.pi * self._done / steps))
            self._done += 1
            for group in self.param_groups:
                for p in group["params"]:
                    if group["kind"] == "muon":
                        _muon(p, self.state[p], group["lr"], momentum, group["decay"] * decay_left)
                    else:
                        _adamw(p, self.state[p], group["lr"], self._done, group["decay"])

    optimizer = Nanochat()
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, steps))


def rate_at(step: int, steps: int) -> float:
    """Returns nanochat's rate over its peak at a step (from 0): up in 40 steps, constant, then linearly down to .05."""
    down = round(WARMDOWN * steps)
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    if step <= steps - down:
        return 1.0
    left = max(steps - step, 0) / down
    return left + (1 - left) * FINAL


def momentum_at(step: int, steps: int) -> float:
    """Returns nanochat's momentum at a step (from 0): .85 to .97 in 400 steps, then to .90 while the rate decays."""
    down = round(WARMDOWN * steps)
    if step < 400:
        return 0.85 + 0.12 * step / 400
    return 0.97 - 0.07 * max(step - (steps - down), 0) / down


def _muon(p: typing.Any, state: dict, lr: float, momentum: float, decay: float) -> None:
    """Updates a matrix (outputs, inputs) once."""
    import torch

    grad, (n_out, n_in) = p.grad, p.shape
    first = state.setdefault("momentum", torch.zeros_like(p))
    first.lerp_(grad, 1 - momentum)
    x = grad.lerp(first, momentum)
    x = x * (x.norm() / math.sqrt(n_out)) / x.norm(dim=1, keepdim=True).clamp_min(1e-6)  # rows of equal norm
    x = x / (1.01 * x.norm() + 1e-6)
    x = x.T if n_out > n_in else x
    for a, b, c in POLAR:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    x = x.T if n_out > n_in else x
    x = x * math.sqrt(min(n_out, n_in)) / x.norm().clamp_min(1e-6)
    mean = x.square().mean(dim=1 if n_out >= n_in else 0, keepdim=True)  # NorMuon: by row of the longer side
    second = state.setdefault("second", torch.zeros_like(mean))
    second.lerp_(mean, 0.1)
    scaled = x * second.clamp_min(1e-10).rsqrt()
    x = scaled * x.norm() / scaled.norm().clamp_min(1e-10)
    lr *= math.sqrt(max(1.0, n_out / n_in))
    p.sub_(lr * x + lr * decay * p * (x * p >= 0))  # decays only where the update agrees


def _adamw(p: typing.Any, state: dict, lr: float, step: int, decay: float) -> None:
    import torch

    first = state.setdefault("first", torch.zeros_like(p)).lerp_(p.grad, 0.2)
    second = state.setdefault("second", torch.zeros_like(p)).lerp_(p.grad.square(), 0.04)
    p.mul_(1 - lr * decay)
    p.sub_(lr / (1 - 0.8**step) * first / ((second / (1 - 0.96**step)).sqrt() + 1e-10))


if __name__ == "__main__":
    child(json.loads(sys.argv[1]))
