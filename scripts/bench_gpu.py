"""Checks and times jaxlm on one GPU, and PyTorch beside it on the same card: `python scripts/bench_gpu.py`.

In this order, each part in a process of its own, as far as `--minutes` allow; the table comes last, whatever was reached:

    attention   every backend against float32 (output, gradients, documents that must not see each other), and its time
    sweep       microbatch x loss tile x remat for a few steps each, with the fastest backend that passed
    jaxlm       200 steps of the best on packed documents through the product's loader, started a second time
    torch       the hand-written torch.compile Llama (scripts/peers/torch_llama.py), then `hf`, Hugging Face's
    fp8, h128, 3b, accumulate      the MLP in float8; heads of 128; the 3.12B model; the shipped batch of 128 rows
    flags       XLA flags, one at a time, against none

The model is configs/gpuburnout_1b.py at 2,048 tokens in bfloat16; every layer's attention must be in fused kernels in the
compiled program, or its row fails. Two calls of nine minutes are meant to do all of it on an H200 (not yet measured):

    python scripts/bench_gpu.py --minutes=9 --out=bench.json
    python scripts/bench_gpu.py --minutes=9 --out=bench.json --sections fp8 h128 3b accumulate flags

(`--out` keeps the results; the second call reads the best settings from it.) A machine without network needs the wheels of
array-record, datatrove, googleapis-common-protos, grain, ml-collections, portpicker, pytz and zstandard beside its own
JAX, flax, optax, Orbax, PyTorch and transformers. tokamax, annotated-types, einshape, immutabledict, pydantic,
pydantic-core, qwix and typing-inspection add that backend (Python 3.12).

`--device=cpu --tiny` runs every part on small shapes in minutes, to see that it works. Copy the rows to
dev/LEADERBOARD.md with the commit, the card and its power limit, and what passed to docs/performance.md.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

ORDER = ("attention", "sweep", "jaxlm", "torch", "hf", "fp8", "h128", "3b", "accumulate", "flags")
SECONDS = dict.fromkeys(ORDER, 100.0) | {
    "attention": 60.0,
    "sweep": 150.0,
    "jaxlm": 120.0,
    "fp8": 200.0,
    "flags": 150.0,
}
# Candidates for jaxlm.xla_flags.FLAGS: measured here, set there once they win.
FLAG_CANDIDATES = (
    "xla_gpu_enable_triton_gemm=false",
    "xla_gpu_enable_command_buffer=",
    "xla_gpu_autotune_level=2",
    "xla_gpu_enable_latency_hiding_scheduler=true",
    "xla_gpu_enable_cublaslt=true",
    "xla_gpu_graph_min_graph_size=1",
)


def options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="begin no further part after this")
    parser.add_argument("--sections", nargs="*", choices=ORDER, default=list(ORDER))
    parser.add_argument("--steps", type=int, default=200, help="timed steps of the main rows; others take a quarter")
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("bench_gpu.json"),
        help="rows so far; a later call goes on from them",
    )
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--tiny", action="store_true", help="small shapes, few steps")
    parser.add_argument("--eager", action="store_true", help="PyTorch without torch.compile")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of configs/base.py")
    args = parser.parse_args(argv)
    if args.device == "gpu" and card() == NO_CARD:
        parser.error("no NVIDIA GPU here (nvidia-smi finds none): try it on the CPU with --device=cpu --tiny --eager")
    return args


NO_CARD = {"name": "no NVIDIA GPU"}


def card() -> dict[str, str]:
    """Name, power limit and driver as the driver gives them."""
    names = ("name", "power.limit", "driver_version")
    try:
        query = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
        said = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().splitlines()[0]
        return dict(zip(names, said.split(", "), strict=False))
    except (OSError, subprocess.CalledProcessError, IndexError):
        return NO_CARD


class Bench:
    """Runs parts one after another, keeps their rows in a file, and knows the best settings so far."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.end = args, time.monotonic() + 60 * args.minutes
        made_with = {"card": card() if args.device == "gpu" else NO_CARD, "tiny": args.tiny, "set": args.set}
        self.state = json.loads(args.out.read_text()) if args.out.is_file() else {"made with": made_with}
        if self.state.get("made with") != made_with:
            sys.exit(
                f"{args.out} has figures of {self.state.get('made with')}, this is {made_with}: give another --out"
            )

    def left(self) -> float:
        return self.end - time.monotonic()

    def part(self, kind: str, label: str, limit: float, flags: str = "", **asked) -> list[dict]:
        """One section's work in a process of its own; its rows, or one that says why there are none."""
        here = pathlib.Path(__file__).resolve().parent
        a = self.args
        work = {"kind": kind, "label": label, "steps": a.steps, "tiny": a.tiny, "eager": a.eager, "set": a.set, **asked}
        work["seconds"] = min(limit, max(self.left(), 20.0))
        env = dict(os.environ)
        env["PYTHONPATH"] = os.pathsep.join(p for p in (str(here.parent), env.get("PYTHONPATH", "")) if p)
        if flags:
            env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} --{flags}".strip()
        if kind in ("torch", "hf"):
            env["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the card is PyTorch's there
        if a.device == "cpu":
            env |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            result = pathlib.Path(folder) / "rows.json"
            command = [sys.executable, str(here / "bench_gpu_parts.py"), json.dumps(work), str(result)]
            try:
                # The part stops by itself at its limit; this is for one that hangs.
                done = subprocess.run(
                    command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=work["seconds"] + 60
                )
                said, code = done.stdout.decode(errors="replace"), done.returncode
            except subprocess.TimeoutExpired as error:
                said, code = (error.stdout or b"").decode(errors="replace"), "no end"
            rows = json.loads(result.read_text()) if result.is_file() else []
        if code != 0:
            lines = [line for line in said.splitlines() if line.strip()]
            rows.append({"what": label, "failed": f"{code}: {lines[-1][:200] if lines else 'nothing said'}"})
            print("\n".join(lines[-15:]), file=sys.stderr)
        for row in rows:
            print(json.dumps(row), flush=True)
        print(f"[{label}: {time.monotonic() - began:.0f} s, {self.left():.0f} s left]", flush=True)
        return rows

    def keep(self, section: str, rows: list[dict]) -> None:
        self.state[section] = rows
        self.args.out.write_text(json.dumps(self.state, indent=1))

    def backend(self) -> str:
        """The fastest attention that passed its checks, else what `auto` takes."""
        passed = [row for row in self.state.get("attention", []) if row.get("ok") and row.get("ms")]
        return min(passed, key=lambda row: row["ms"])["backend"] if passed else "auto"

    def best(self) -> dict:
        """Settings of the fastest candidate of the sweep."""
        rows = [row for row in self.state.get("sweep", []) if row.get("tokens/s")]
        keys = max(rows, key=lambda row: row["tokens/s"])["keys"] if rows else {"loss.tile_tokens": 4096}
        return {"model.attention": self.backend(), **keys}

    def section(self, name: str) -> list[dict]:
        best, limit = self.best(), SECONDS[name]
        few = max(self.args.steps // 4, 3)
        if name == "attention":
            return self.part("attention", name, limit)
        if name == "sweep":
            return self.part("sweep", name, limit, backend=self.backend())
        if name == "jaxlm":
            return self.part("jaxlm", "jaxlm 1.04B", limit, keys=best)
        if name in ("torch", "hf"):
            label = {"torch": "torch.compile, by hand, 1.04B", "hf": "Hugging Face, torch.compile, 1.04B"}[name]
            return self.part(name, label, limit, steps=few)
        if name == "fp8":
            return self.part("jaxlm", "jaxlm 1.04B fp8", limit, keys=best | {"model.fp8": True}, steps=few)
        if name == "h128":
            return self.part("jaxlm", "jaxlm 1.04B h128", limit, keys=best, model="gpuburnout_1b_h128", steps=few)
        if name == "3b":
            small = {"train.microbatch_size": 8, "model.remat": "names"}
            return self.part("jaxlm", "jaxlm 3.12B", limit, keys=best | small, model="gpuburnout_3b", steps=few // 2)
        if name == "accumulate":
            whole = {"train.batch_size": 8 if self.args.tiny else 128}
            return self.part("jaxlm", "jaxlm 1.04B, 128 rows a step", limit, keys=best | whole, steps=few // 4 + 2)
        rows = []
        for flag in ("", *FLAG_CANDIDATES[: 2 if self.args.tiny else None]):
            if rows and self.left() < 60:
                break
            rows += self.part("jaxlm", f"jaxlm 1.04B {flag or 'no flag'}", 60, flags=flag, keys=best, steps=20)
        return rows

    def table(self) -> None:
        """All rows, the newest of each section, with each one's ratio to the best peer."""
        print(f"\n{json.dumps(card())}")
        for row in self.state.get("attention", []):
            print("  ".join(f"{key} {value}" for key, value in row.items()))
        timed = [row for name in ORDER[1:] for row in self.state.get(name, [])]
        peers = [
            row["tokens/s"] for row in timed if row["what"].startswith(("torch", "Hugging")) and "failed" not in row
        ]
        for row in timed:
            if "failed" in row:
                print(f"{row['what']}: FAILED {row['failed']}")
                continue
            same = peers and row["what"].startswith("jaxlm 1.04B") and "h128" not in row["what"]
            ratio = {"ratio": round(row["tokens/s"] / max(peers), 3)} if same else {}
            print("  ".join(f"{key} {value}" for key, value in (row | ratio).items() if key != "keys"))


def main(argv: list[str] | None = None) -> int:
    """0 when no row failed."""
    bench = Bench(options(argv))
    reached = []
    for name in ORDER:
        if name not in bench.args.sections:
            continue
        if bench.left() < 30:
            print(f"[no time left for {name}]")
            continue
        bench.keep(name, bench.section(name))
        reached.append(name)
    bench.table()
    return int(any("failed" in row or row.get("ok") is False for name in reached for row in bench.state[name]))


if __name__ == "__main__":
    sys.exit(main())
