"""Traces and lowers a config's train step for a mesh of fake CPU devices, and prints where each parameter lives.

    python scripts/lower.py --config=gpuburnout_3b --devices=8 --config.mesh.data=1 --config.mesh.fsdp=8

Nothing of the model's size is allocated. Fails when a parameter of over a million elements is left whole on every device
of a mesh that has an fsdp axis.
"""

import argparse
import dataclasses
import math
import sys
import time

import jax

from jaxlm import config_files, sharding
from jaxlm.config import ConfigError, resolve
from jaxlm.plan import lower
from jaxlm.programs import setup
from jaxlm.programs.console import print_table

LARGE = 1_000_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="a shipped config by name, or a config file")
    parser.add_argument("--devices", type=int, default=1, help="fake devices")
    args, overrides = parser.parse_known_args()
    jax.config.update("jax_num_cpu_devices", args.devices)
    try:
        config = config_files.load(args.config, [o.removeprefix("--config.") for o in overrides])
        config = setup.for_platform(resolve(config), "cpu")
        mesh = sharding.make_mesh(config.mesh)
        sharding.check_batch(mesh, **{"train.microbatch_size": config.train.microbatch_size})
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    start = time.monotonic()
    lowered, rows = lower.lower_step(config, mesh)
    seconds = time.monotonic() - start
    shown = [row for row in rows if not row.name.startswith("layers_") or row.name.startswith("layers_0/")]
    print_table([dataclasses.asdict(row) for row in shown], as_json=False)
    total, local = (sum(row.per_device if own else math.prod(row.shape) for row in rows) for own in (False, True))
    print(
        f"{config.model.n_layers} layers; {total:,} elements (padding of the vocabulary included), {local:,} on each device"
    )
    print(
        f"mesh {dict(mesh.shape)}, {config.model.dtype}; lowered in {seconds:.1f} s, {len(lowered.as_text()):,} characters"
    )
    whole = [row.name for row in rows if row.replicated and math.prod(row.shape) > LARGE]
    if whole and mesh.shape["fsdp"] > 1:
        print(f"left whole on every device: {', '.join(whole)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
