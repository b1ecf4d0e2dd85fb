"""Compiles shipped configs' train steps for absent H100s, and compares `jaxlm plan`'s arithmetic with XLA's figures.

    pip install -e ".[cuda12]" && JAX_PLATFORMS=cpu python scripts/check_plan.py            # all, about a minute each
    JAX_PLATFORMS=cpu python scripts/check_plan.py gpuburnout_1b --config.model.remat=full

No GPU is needed: JAX's CUDA plugin compiles for a described GPU. Each config is compiled whole, in bfloat16, on its own mesh
(eight devices if mesh.fsdp or mesh.data takes all devices and the model needs several, else one).
Without overrides the figures are written to tests/plan/h100_memory.json, with which a test compares the arithmetic.
Fails if a figure is off by more than 10%.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import time

import jax

from jaxlm.config import Config, MeshConfig, config_files, resolve
from jaxlm.devices import sharding
from jaxlm.models import hardware
from jaxlm.plan import fit, lower, memory

ROOT = pathlib.Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests/plan/h100_memory.json"
DEVICES = {"domain_7b": 8}
# Besides the shipped configs: variants with other policies, optimizers and meshes.
VARIANTS = [
    ("gpuburnout_1b", 1, ["model.remat=names"]),
    ("gpuburnout_1b", 1, ["model.remat=dots"]),
    ("gpuburnout_1b", 1, ["model.remat=full", "train.microbatch_size=1"]),
    ("gpuburnout_1b", 8, ["mesh.fsdp=8", "mesh.data=1"]),
    ("gpuburnout_1b", 8, ["mesh.fsdp=4", "mesh.data=1", "mesh.tensor=2"]),
    ("gpuburnout_3b", 1, ["optim.name=adamw"]),
    ("gpuburnout_3b", 8, []),
    ("domain_7b", 8, ["model.remat=full", "train.microbatch_size=8"]),
]
# Post-training of models that are not deep, which compile in a minute or two.
ROW = ["train.batch_size=4", "train.microbatch_size=1", "model.remat=full"]
LORA = ["model.n_layers=4", "adapter.kind=lora"]
VARIANTS += [
    ("gpuburnout_1b", 1, keys)
    for keys in (
        ["program=sft", "model.n_layers=8", *ROW],
        ["program=dpo", "model.n_layers=8", *ROW],
        ["program=reward", "model.n_layers=8", *ROW],
        ["program=sft", *LORA, "train.batch_size=2", "train.microbatch_size=2"],
        ["program=sft", *LORA, *ROW],
        ["program=sft", *LORA, *ROW, "adapter.quantize=nf4"],
        ["program=sft", *LORA, "adapter.quantize=int8", "train.batch_size=2", "train.microbatch_size=2"],
        ["program=sft", *LORA, "adapter.targets=('attn/[qkvo]',)", "train.batch_size=2", "train.microbatch_size=2"],
        ["program=sft", *LORA, "adapter.kind=prompt", "train.batch_size=4", "train.microbatch_size=4"],
        ["program=dpo", *LORA, "train.batch_size=4", "train.microbatch_size=4"],
        ["program=dpo", *LORA, *ROW, "adapter.quantize=nf4"],
    )
]


def planned(name: str, devices: int, overrides: list[str]) -> tuple[Config, MeshConfig]:
    """Returns the config as a GPU would run it, and its mesh over these devices."""
    config = resolve(config_files.load(name, ["workdir=w", *overrides]))
    config = dataclasses.replace(config, model=hardware.for_platform(config.model, "gpu"))
    mesh = MeshConfig(**sharding.mesh_shape(config.mesh, devices))
    return fit.with_changes(config, microbatch=fit.own_microbatch(config, mesh)), mesh


def check(name: str, devices: int, overrides: list[str]) -> dict:
    """Compiles one config and compares the figures."""
    where = lower.target(devices, 1)  # first: without the plugin this sets the number of CPU devices
    if where.platform != "gpu":
        sys.exit('JAX has no CUDA plugin: pip install -e ".[cuda12]"')
    config, mesh = planned(name, devices, overrides)
    guess = memory.estimate(config, memory.abstract_mesh(mesh, devices)).total
    start = time.monotonic()
    real = sharding.make_mesh(mesh, where.devices)
    lowered = lower.parts_of(dataclasses.replace(config, mesh=mesh), real).lower()
    # Memory is assigned before code generation, so quick code generation does not change the figures.
    taken = lower.memory_of(lowered.compile(compiler_options=where.options | lower.QUICK))
    off = guess / taken - 1
    print(
        f"{name:<20}{devices} device(s) {' '.join(overrides):<48}{guess / 1e9:>8.2f} GB by arithmetic "
        f"{taken / 1e9:>8.2f} compiled {off:+.1%}  {time.monotonic() - start:.0f} s",
        flush=True,
    )
    return {"config": name, "devices": devices, "overrides": overrides, "bytes": taken, "off": off}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*", help="shipped configs; none = all, and the variants")
    overrides = [word.removeprefix("--config.") for word in sys.argv[1:] if word.startswith("--config.")]
    args = parser.parse_args([word for word in sys.argv[1:] if not word.startswith("--config.")])
    pretraining = [name for name in config_files.shipped_configs() if config_files.load(name).program == "pretrain"]
    names = args.configs or pretraining
    cases = [(name, DEVICES.get(name, 1), overrides) for name in names]
    whole = not (args.configs or overrides)
    rows = []
    for case in cases + (VARIANTS if whole else []):
        rows.append(check(*case))
        if whole:
            lines = ",\n".join(json.dumps({k: v for k, v in row.items() if k != "off"}) for row in rows)
            GOLDEN.write_text(f'{{"jax": "{jax.__version__}", "rows": [\n{lines}\n]}}\n')
    return int(any(abs(row["off"]) > 0.1 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
