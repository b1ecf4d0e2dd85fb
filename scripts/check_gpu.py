"""Checks and times everything on the accelerator at hand, in one call: `python scripts/check_gpu.py`.

1. Each attention backend of this platform in bfloat16 against the reference in float32, forward and gradients, and
   whether a document sees another (it must not, exactly).
2. The train step of `local_35m` and of the 1.04B shape at 2,048 tokens, with each backend: tokens/s, MFU, peak memory.

The last thing printed is a table. About five minutes; `--seconds` bounds the timing of each step. A machine without
network needs the wheels of grain, array_record, ml_collections, clu, absl-py and tensorboardX beside its own JAX, and
the checkout on PYTHONPATH. Copy the rows to dev/LEADERBOARD.md with the commit, the card and its power limit.
"""

import argparse
import gc
import statistics
import subprocess
import time

import jax
import jax.numpy as jnp
import numpy as np
from bench_step import jaxlm_step, make_config

from jaxlm.ops.attention import BACKENDS, attention, resolve_backend
from jaxlm.plan import flops
from jaxlm.programs.console import print_table

SHAPES = {
    "35M": (64, 512, ["model.n_kv_heads=4", "model.vocab_size=20480"]),
    "1.04B": (
        16,
        2048,
        [
            "model.n_layers=16",
            "model.d_model=2048",
            "model.n_heads=32",
            "model.n_kv_heads=8",
            "model.d_ff=8192",
            "model.vocab_size=32005",
            "model.rope.theta=500000.0",
        ],
    ),
}


def backends() -> list[str]:
    """Those that this platform can run."""
    found = []
    for name in BACKENDS:
        try:
            found.append(resolve_backend(name, jax.default_backend()))
        except ValueError:
            continue
    return found


def check_attention(backend: str) -> dict:
    """Largest relative error against float32, and the change that another document's values make (must be 0)."""
    b, t, n, k, h = 2, 512, 8, 4, 64
    keys = jax.random.split(jax.random.key(0), 4)
    q, kk, v, d_out = (jax.random.normal(key, (b, t, heads, h)) for key, heads in zip(keys, (n, k, k, n), strict=True))
    ids = jnp.asarray(np.searchsorted([100, 300], np.arange(t), side="right") + 1)[None].repeat(b, 0)

    def run(backend: str, dtype: jnp.dtype, v: jax.Array) -> list[np.ndarray]:
        def both(q, kk, v, d_out):
            out, vjp = jax.vjp(
                lambda *a: attention(*a, backend=backend, q_segment_ids_BxT=ids, kv_segment_ids_BxS=ids), q, kk, v
            )
            return (out, *vjp(d_out))

        return [np.asarray(x, np.float32) for x in jax.jit(both)(*(x.astype(dtype) for x in (q, kk, v, d_out)))]

    want, got = run("xla", jnp.float32, v), run(backend, jnp.bfloat16, v)
    other = run(backend, jnp.bfloat16, v.at[:, 100:300].add(1.0))[0]
    outside = np.r_[0:100, 300:t]
    error = max(np.abs(g - w).max() / np.abs(w).max() for g, w in zip(got, want, strict=True))
    leak = float(np.abs(other[:, outside] - got[0][:, outside]).max())
    inside = float(np.abs(other[:, 100:300] - got[0][:, 100:300]).max())
    return {
        "what": f"attention {backend}",
        "error": float(error),
        "leak": leak,
        "ok": error < 0.02 and leak == 0 < inside,
    }


def time_step(shape: str, backend: str, seconds: float) -> dict:
    """Median tokens/s of the whole train step after two steps of warm-up."""
    batch, seq_len, keys = SHAPES[shape]
    config = make_config(batch, seq_len, [*keys, f"model.attention={backend}"])
    began = time.perf_counter()
    run = jaxlm_step(config)
    run()
    compiled = time.perf_counter() - began
    run()
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    speed = batch * seq_len / statistics.median(times)
    per_token, peak = flops.flops_per_token(config.model, seq_len), flops.peak_tflops(jax.devices()[0].device_kind)
    memory = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    mfu = [f"{speed * f / (peak * 1e12):.3f}" if peak else "-" for f in (per_token.palm, per_token.causal)]
    row = {"what": f"{shape} {backend}", "tokens/s": round(speed), "mfu_palm": mfu[0], "mfu_causal": mfu[1]}
    return row | {"peak_GB": round(memory / 1e9, 1), "first_step_s": round(compiled, 1), "steps": len(times)}


def card() -> str:
    """Name and power limit as the driver gives them."""
    try:
        query = ["nvidia-smi", "--query-gpu=name,power.limit,driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return jax.devices()[0].device_kind


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="timing of each step")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    args = parser.parse_args()
    checks, speeds = [], []
    for backend in backends():
        checks.append(check_attention(backend))
        print(checks[-1], flush=True)
    for shape in args.shapes:
        for backend in [row["what"].split()[1] for row in checks if row["ok"]]:
            try:
                speeds.append(time_step(shape, backend, args.seconds))
            except Exception as error:  # out of memory for one backend must not cost the rows of the others
                speeds.append({"what": f"{shape} {backend}", "failed": str(error).splitlines()[0][:80]})
            print(speeds[-1], flush=True)
            gc.collect()
    print(f"\n{card()}; jax {jax.__version__}")
    print_table(checks, as_json=False)
    print_table([row for row in speeds if "failed" not in row], as_json=False)
    print_table([row for row in speeds if "failed" in row], as_json=False)


if __name__ == "__main__":
    main()
