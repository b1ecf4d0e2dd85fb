"""The parts of scripts/bench_gpu.py, which runs each in its own process.

Legend: B batch, T tokens, N query heads, K key-value heads, H head dim.
"""

import contextlib
import ctypes
import dataclasses
import gc
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import typing

import bench_loader
import bench_step
import fused
import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.config import Config, config_files, resolve
from jaxlm.data.batches import document_rows, loader
from jaxlm.devices import processes
from jaxlm.models import hardware
from jaxlm.ops import attention_kernels
from jaxlm.ops.attention import BACKENDS, attention, resolve_backend
from jaxlm.plan import flops, lower

FUSED = ("cudnn", "cudnn_packed", "tokamax", "pallas")
ROWS = "train.microbatch_size"
TINY = {
    "model.n_layers": 2,
    "model.d_model": 64,
    "model.n_heads": 4,
    "model.n_kv_heads": 2,
    "model.head_dim": 16,
    "model.d_ff": 128,
    "model.vocab_size": 512,
    "train.seq_len": 64,
}


def make_config(work: dict, keys: dict) -> Config:
    """Returns a shipped config with one microbatch per step unless `keys` say otherwise."""
    batch = keys.get("train.microbatch_size", 2 if work["tiny"] else 16)
    found = {"workdir": "unused", "train.batch_size": batch, "train.microbatch_size": batch, **keys}
    if work["tiny"]:
        found |= TINY
    overrides = [f"{key}={value}" for key, value in found.items()] + work["set"]
    c = resolve(config_files.load(work.get("model", "gpuburnout_1b"), overrides))
    return dataclasses.replace(c, model=hardware.for_platform(c.model, jax.devices()[0].platform))


def compiled_step(config: Config, batches: bench_step.Batches) -> tuple[bench_step.Side, float]:
    """Returns the product's compiled step and its planned bytes. Raises RuntimeError if its attention is not fused."""
    side, m = bench_step.jaxlm_step(config, batches), config.model
    if m.attention in FUSED:
        layers = 1 if m.scan_layers else m.n_layers
        fused.check_attention(side.compiled.as_text(), m.attention, layers, config.train.seq_len)
    return side, lower.memory_of(side.compiled)


def real_batches(config: Config, folder: pathlib.Path) -> typing.Iterator[dict[str, np.ndarray]]:
    """Yields packed documents from the product's loader, from shards made here."""
    tokens = max(2_000_000, 40 * config.train.batch_size * config.train.seq_len)
    data = bench_loader.make_data(folder, tokens, config.model.vocab_size)
    order = document_rows.Rows(data, data.mixture, 0, config.train.seq_len, config.train.batch_size)
    return loader.TrainLoader(order)


def times(side: bench_step.Side, steps: int, seconds: float) -> tuple[float, list[float], int]:
    """Returns (mean seconds of steps run back to back, seconds of single steps with the next one queued, number of the first).

    Args:
      steps: at most this many back to back, then a quarter as many single steps.
      seconds: about, for both together.
    """
    start = time.perf_counter()
    side.wait(side.run())
    alone = time.perf_counter() - start
    steps = max(min(steps, int(0.75 * seconds / alone)), 3)
    start = time.perf_counter()
    for _ in range(steps):
        queued = side.run()
    side.wait(queued)
    mean = (time.perf_counter() - start) / steps
    queued, ends = side.run(), []
    for _ in range(max(steps // 4, 5)):
        following = side.run()
        side.wait(queued)
        queued = following
        ends.append(time.perf_counter())
    side.wait(queued)
    return mean, list(np.diff(ends)), steps


def row(label: str, config: Config, timing: tuple[float, list[float], int], **more) -> dict:
    """Returns a timed row, with MFU by 6N + 12LdT (palm) and 6N + 6LdT (causal) over the card's dense bf16 peak."""
    mean, each, steps = timing
    tokens = config.train.batch_size * config.train.seq_len
    per_token = flops.flops_per_token(config.model, config.train.seq_len)
    peak = flops.peak_tflops(jax.devices()[0].device_kind)
    mfu = {}
    if peak:
        share = tokens / mean / (peak * 1e12)
        mfu = {"mfu_palm": round(share * per_token.palm, 4), "mfu_causal": round(share * per_token.causal, 4)}
    p50, p95 = (round(1e3 * float(np.percentile(each, q)), 2) for q in (50, 95))
    found = {"what": label, "tokens/s": round(tokens / mean), **mfu, "p50_ms": p50, "p95_ms": p95, "steps": steps}
    t = config.train
    found |= {"rows": t.microbatch_size} | ({"rows a step": t.batch_size} if t.batch_size != t.microbatch_size else {})
    return found | more


def jaxlm_row(work: dict, label: str, keys: dict, steps: int, seconds: float) -> dict:
    """Builds the product's step, checks that its attention is fused, times it on real rows."""
    config = make_config(work, keys)
    with tempfile.TemporaryDirectory() as folder, real_batches(config, pathlib.Path(folder)) as batches:
        began = time.perf_counter()
        side, planned = compiled_step(config, batches)
        compiled = time.perf_counter() - began
        loss = float(side.wait(side.run()))
        first = time.perf_counter() - began
        for _ in range(2):
            side.wait(side.run())
        timing = times(side, steps, max(seconds - (time.perf_counter() - began), 3.0))
        last = float(side.wait(side.run()))
    if not np.isfinite([loss, last]).all():
        raise RuntimeError(f"losses {loss} and {last}")
    stats, m = jax.devices()[0].memory_stats() or {}, config.model
    more = {
        "planned_GB": round(planned / 1e9, 1),
        "peak_GB": round(stats.get("peak_bytes_in_use", 0) / 1e9, 1),
    }
    more |= {"compile_s": round(compiled, 1), "first_step_s": round(first, 1), "loss": f"{loss:.3f} to {last:.3f}"}
    more |= {"attention": m.attention, "remat": m.remat, "tile": config.loss.tile_tokens, "keys": keys}
    return row(label, config, timing, **more)


def sweep(work: dict) -> typing.Iterator[dict]:
    """Yields a row for each candidate, timed over a few steps, as long as there is time; also if it does not fit."""
    end = time.perf_counter() + work["seconds"] - (5 if work["tiny"] else 20)  # the latest start
    small, middle, large = (2, 4, 8) if work["tiny"] else (16, 32, 64)
    base = {"train.microbatch_size": small, "model.remat": "none", "loss.tile_tokens": 4096}
    base["model.attention"] = work["backend"]
    candidates = [{}, {"train.microbatch_size": middle}]  # later: changes of the best so far
    candidates += [{"loss.tile_tokens": 16384}, {"loss.tile_tokens": 2048}, {"model.fuse_projections": False}]
    candidates += [{"train.microbatch_size": large, "model.remat": "names"}, {"train.microbatch_size": small // 2}]
    best, fastest = base, 0
    for change in candidates:
        if time.perf_counter() > end:
            return
        keys = best | change
        label = "jaxlm 1.04B, " + ", ".join(f"{key.split('.')[-1]} {value}" for key, value in keys.items())
        try:
            found = jaxlm_row(work, label, keys, 8, 6.0)
            del found["peak_GB"]  # the peak of all candidates so far, which only grows
            if found["tokens/s"] > fastest:
                best, fastest = keys, found["tokens/s"]
        except Exception as error:  # if one candidate is out of memory, the others go on
            found = {"what": label, "failed": str(error).splitlines()[0][:160]}
        yield found
        jax.clear_caches()
        gc.collect()


def decoder(work: dict) -> tuple:
    """Returns the model in bfloat16, random weights, the tokens of a prompt and of an answer."""
    import bench_decode  # here and below, since decoding needs packages that no other section does

    from jaxlm import models

    prompt, new = (4, 8) if work["tiny"] else (32, 128)
    config = make_config(work, {"model.max_seq_len": 64 if work["tiny"] else 1024})
    model = models.build(config.model, "xla")
    return model, {"params": bench_decode.random_params(model, 0)}, prompt, new


def decode(work: dict) -> typing.Iterator[dict]:
    """Yields the decoder's greedy tokens per second for each number of rows, and the weights that it reads for them."""
    from jaxlm.eval.completions import greedy
    from jaxlm.models.decode import generate, schedule
    from jaxlm.models.decode.engine import Engine

    model, variables, prompt, new = decoder(work)
    for rows in (1, 2) if work["tiny"] else (1, 8, 64):
        engine = Engine(model, variables, rows=rows, prefix_bytes=0)
        prompts = np.random.default_rng(1).integers(3, model.config.vocab_size, (rows, prompt)).tolist()
        asks, speeds = generate.asks(prompts, greedy(new)), []
        for _ in range(6):
            began = time.perf_counter()
            tokens = sum(map(len, schedule.tokens_of(engine, asks)))
            speeds.append(tokens / (time.perf_counter() - began))
        speed = statistics.median(speeds[1:])  # the first compiles
        reads = round(engine.step_bytes * speed / rows / 1e9, 1)
        yield {"what": f"jaxlm 1.04B decode, {rows} rows", "tokens/s": round(speed), "GB/s": reads}


def serve(work: dict) -> typing.Iterator[dict]:
    """Yields the server's tokens per second and waits (ms), without HTTP, for each number of clients."""
    import bench_serve

    from jaxlm.serve.batcher import Batcher

    model, variables, prompt, new = decoder(work)
    batcher = Batcher(model, variables, rows=2 if work["tiny"] else 8)
    batcher.warm(lambda line: print(line, flush=True))
    for found in bench_serve.by_clients(batcher, prompt=prompt, new=new):
        clients, failed = found.pop("clients"), found.pop("failed")
        if failed:
            raise RuntimeError(f"{failed} requests of {clients} clients failed")
        yield {"what": f"jaxlm 1.04B serve, {clients} clients"} | {
            name: round(value, 1) for name, value in found.items()
        }
    batcher.close()


def post(work: dict) -> typing.Iterator[dict]:
    """Yields the rate of `jaxlm train sft` or grpo, as a user runs them, from a base of two steps on made text.

    The reward is an answer's length, so that no task has to be installed.
    """
    folder, tiny, rng = pathlib.Path(tempfile.mkdtemp()), work["tiny"], np.random.default_rng(0)
    vocabulary, documents, size = (320, 400, 4) if tiny else (16_384, 20_000, 40)
    words = ["".join(letters) for letters in rng.choice(list("abcdefghijklmnopqrstuvwxyz"), (vocabulary, 6))]
    texts = [" ".join(rng.choice(words, size)) for _ in range(documents)]
    chats = [{"prompt": text[:13], "response": text[14:]} for text in texts[:2000]]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    (folder / "longer.py").write_text(
        "def reward(prompts, answers, **columns):\n    return [len(a) / 100 for a in answers]\n"
    )
    batch, length = (4, 64) if tiny else (16, 1024)
    rows = {
        "train.batch_size": batch,
        "train.microbatch_size": batch,
        "train.seq_len": length,
        "train.eval_every_steps": 0,
    }
    rows |= {
        "optim.warmup_steps": 1,
        "checkpoint.keep_last": 1,
        "checkpoint.keep_best": 0,
        "sample.prompts": (),
        "log.every_steps": 1,
    }
    large = config_files.load("gpuburnout_1b", []).model
    shape = {f"model.{key}": large[key] for key in ("n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff")}
    shape = TINY if tiny else shape
    base = {"data.path": folder / "texts.jsonl", "data.chat_tokens": True, "train.steps": 2}
    jaxlm(folder, "base", "base", shape | {"model.vocab_size": vocabulary} | rows | base)
    learn = {"origin": folder / "base", "train.steps": 4 if tiny else 30, "replay.share": 0.0}
    jaxlm(folder, "sft", "sft", rows | learn | {"data.path": folder / "chats.jsonl"})
    if work["kind"] == "grpo":
        prompts, new, steps = (2, 16, 3) if tiny else (8, 128, 8)
        ask = {"origin": folder / "sft", "train.steps": steps, "rollout.prompts": prompts, "rollout.answers": prompts}
        ask |= {"rollout.max_new_tokens": new, "reward.function": "longer:reward", "data.path": folder / "chats.jsonl"}
        jaxlm(folder, "grpo", "grpo", rows | ask | {"eval.at_start": False})
    records = [json.loads(line) for line in (folder / work["kind"] / "metrics.jsonl").read_text().splitlines()]
    first, *_, last = (record for record in records if "train/loss" in record)  # the first step compiles
    seconds = {name: last[f"time/{name}_s"] - first[f"time/{name}_s"] for name in ("rollout", "data", "step")}
    figures = {"tokens/s": round((last["tokens"] - first["tokens"]) / sum(seconds.values()))}
    figures |= {f"{name}_s": round(spent / (last["step"] - first["step"]), 4) for name, spent in seconds.items()}
    yield {"what": f"jaxlm 1.04B {work['kind']}", **figures, "rows": batch, "seq_len": length}


def jaxlm(folder: pathlib.Path, name: str, config: str, keys: dict) -> None:
    """Trains `config` in folder/name. Raises RuntimeError with its last line if it fails."""
    given = [f"--config.{key}={value}" for key, value in ({"workdir": folder / name} | keys).items()]
    command = [sys.executable, "-m", "jaxlm.main", f"--config={config}", *given]
    path = os.pathsep.join([str(folder), os.environ["PYTHONPATH"]])
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"jaxlm train {config}: {(done.stderr.strip() or 'nothing said').splitlines()[-1]}")


def peer_sizes(work: dict, card_bytes: float) -> tuple[int, ...]:
    """Returns the batch sizes that a peer tries, largest first; each one that does not fit costs a compilation.

    Below 100 GiB the first is 16; Hugging Face's float32 logits and activations of 32 rows fit on no card.
    """
    asked = [int(value) for key, _, value in (one.partition("=") for one in work["set"]) if key == ROWS]
    if asked:
        return (asked[-1],)
    if work["tiny"]:
        return (2,)
    return (32, 16, 8) if work["kind"] == "torch" and card_bytes >= 100 * 2**30 else (16, 8)


def peer(work: dict) -> dict:
    """Times PyTorch with the largest batch that fits."""
    import torch

    card_bytes = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0
    sizes = peer_sizes(work, card_bytes)
    for size in sizes:
        # After --set: a peer has no microbatches, so all rows are one batch.
        config = make_config(work | {"set": [*work["set"], f"train.batch_size={size}", f"{ROWS}={size}"]}, {})
        with contextlib.suppress(torch.OutOfMemoryError):
            return peer_row(work, config)
        # Outside `with`: the error held the model. Reset, else torch compiles for any number of rows, which is slower.
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
    raise RuntimeError(f"not even {sizes[-1]} rows fit")


def peer_row(work: dict, config: Config) -> dict:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder, real_batches(config, pathlib.Path(folder)) as batches:
        began = time.perf_counter()
        if work["kind"] == "hf":
            side = bench_step.hugging_face_step(config, "fused", not work["eager"], batches)
        else:
            side = by_hand(config, device, batches, not work["eager"])
        loss = float(side.wait(side.run()))
        first = time.perf_counter() - began
        for _ in range(3):
            side.wait(side.run())
        timing = times(side, work["steps"], max(work["seconds"] - (time.perf_counter() - began), 10.0))
        last = float(side.wait(side.run()))
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    more = {"peak_GB": round(peak / 1e9, 1), "first_step_s": round(first, 1), "loss": f"{loss:.3f} to {last:.3f}"}
    return row(work["label"], config, timing, **more)


def by_hand(config: Config, device: str, batches: bench_step.Batches, compiled: bool) -> bench_step.Side:
    from peers.torch_llama import Trainer

    trainer = Trainer(config, device, compile_model=compiled)

    def run() -> tuple:
        batch = next(batches)
        ids = (bench_step.torch_tokens(batch[name], device) for name in ("tokens", "targets"))
        return bench_step.marked(trainer.step(*ids))

    return bench_step.Side(run, bench_step.wait_for)


def documents(batch: int, length: int) -> np.ndarray:
    """Returns segment ids of rows cut from a stream of documents of 20 to 900 tokens, so that some rows have many documents."""
    ends = np.cumsum(np.random.default_rng(0).integers(20, 900, batch * length // 20))
    document = np.searchsorted(ends, np.arange(batch * length), side="right").reshape(batch, length)
    return (document - document[:, :1] + 1).astype(np.int32)


def attention_rows(work: dict) -> typing.Iterator[dict]:
    """Checks and times each backend that this device runs; `cudnn_packed` also with more and less room for documents."""
    platform = jax.devices()[0].platform
    timed = (2, 64, 4, 2, 16) if work["tiny"] else (16, 2048, 32, 8, 64)
    for backend in BACKENDS:
        try:
            resolve_backend(backend, platform)
        except ValueError:
            continue
        found = {"backend": backend}
        try:
            found |= check_attention(backend, documents(2, 512))
            # Documents of two tokens: more than cudnn_packed has room for.
            crowded = check_attention(backend, np.tile(np.arange(512, dtype=np.int32) // 2, (2, 1)))
            found["ok"] = found["ok"] and crowded["ok"]
            if backend != "xla" or work["tiny"]:
                found["ms"] = round(time_attention(backend, timed), 3)
            if backend == "cudnn_packed":
                for tokens in (64, 256):
                    attention_kernels.TOKENS_PER_SEGMENT = tokens
                    found[f"ms at {tokens} tokens a segment"] = round(time_attention(backend, timed), 3)
                attention_kernels.TOKENS_PER_SEGMENT = 128
        except Exception as error:  # if a backend is missing or fails, the others go on
            found |= {"ok": None, "not run": str(error).splitlines()[0][:160]}
        yield found


def inputs(shape: tuple[int, ...], dtype: jnp.dtype) -> list[jax.Array]:
    b, t, n, k, h = shape
    keys = jax.random.split(jax.random.key(0), 4)
    return [
        jax.random.normal(key, (b, t, heads, h)).astype(dtype) for key, heads in zip(keys, (n, k, k, n), strict=True)
    ]


def both_ways(backend: str, ids: np.ndarray) -> typing.Callable:
    """Returns a compiled function (q, k, v, d_out) -> (out, d_q, d_k, d_v)."""

    def run(q, k, v, d_out, ids):
        out, vjp = jax.vjp(lambda *a: attention(*a, backend=backend, segment_ids_BxT=ids), q, k, v)
        return (out, *vjp(d_out))

    compiled = jax.jit(run)
    return lambda *arrays: compiled(*arrays, jnp.asarray(ids))


def check_attention(backend: str, ids: np.ndarray) -> dict:
    """Returns the worst relative error (norm) of output and gradients against float32, and the leak between documents: 0."""
    q, k, v, d_out = inputs((*ids.shape, 8, 4, 64), jnp.bfloat16)

    def as_float(arrays: typing.Iterable) -> list[np.ndarray]:
        return [np.asarray(x, np.float64) for x in arrays]

    with jax.default_matmul_precision("highest"):
        want = as_float(both_ways("xla", ids)(*(x.astype(jnp.float32) for x in (q, k, v, d_out))))
    run = both_ways(backend, ids)
    got = as_float(run(q, k, v, d_out))
    error = max(np.linalg.norm(g - w) / np.linalg.norm(w) for g, w in zip(got, want, strict=True))
    changed = ids == ids[0, ids.shape[1] // 2]  # a document of the first row, and those with its id in other rows
    moved = as_float(run(*(jnp.where(changed[..., None, None], 3 * x + 1, x) for x in (q, k, v)), d_out))[0]
    silent = as_float(run(q, k, v, jnp.where(changed[..., None, None], d_out, 0)))[1:]
    leak = max(np.abs(moved - got[0])[~changed].max(), *(np.abs(x)[~changed].max() for x in silent))
    inside = np.abs(moved - got[0])[changed].max()
    ok = bool(error < 0.01 and leak == 0 < inside)
    return {"error": float(f"{error:.2e}"), "leak": float(leak), "ok": ok}


def time_attention(backend: str, shape: tuple[int, ...]) -> float:
    """Returns the milliseconds of one layer's attention, forward and backward, at the model's shape (median of 5 x 10)."""
    arrays, run = inputs(shape, jnp.bfloat16), both_ways(backend, documents(*shape[:2]))
    jax.block_until_ready(run(*arrays))
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(10):
            found = run(*arrays)
        jax.block_until_ready(found)
        taken.append((time.perf_counter() - start) * 100)
    return float(np.median(taken))


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("a part of scripts/bench_gpu.py, which runs it")
    work, out = json.loads(sys.argv[1]), pathlib.Path(sys.argv[2])
    if sys.platform == "linux":  # 1 is PR_SET_PDEATHSIG: no part outlives a script that was killed
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != work["script"]:
        sys.exit("the script that began this part was killed")
    kind = work["kind"]
    work["seconds"] = max(work["until"] - time.monotonic(), 3.0)  # the imports took some
    processes.apply_xla_flags(())  # the product's own; what stands in the environment wins
    if work["tiny"]:
        work["steps"] = min(work["steps"], 4)
    several = {"attention": attention_rows, "sweep": sweep, "decode": decode, "serve": serve, "sft": post, "grpo": post}
    if kind in several:
        found = several[kind](work)
    elif kind == "jaxlm":
        found = [jaxlm_row(work, work["label"], work["keys"], work["steps"], work["seconds"])]
    else:
        found = [peer(work)]
    with out.open("a") as lines:
        for one in found:
            print(json.dumps(one), file=lines, flush=True)  # at once: rows written stay, whatever follows


if __name__ == "__main__":
    main()
