"""Measures `jaxlm export` on a model with random weights: seconds for writing and for checking, and peak memory.

    python scripts/measure_export.py FOLDER gpuburnout_1b hf:bf16 gguf:q8_0

FOLDER gets a run of that shape (default gpuburnout_1b, 4.2 GB) and the exports; each export is deleted when measured. An
existing run is used again. `cpu_s` is the CPU time of all cores, for machines with other load (`load`).
"""

import argparse
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys


def make(run: pathlib.Path, name: str) -> None:
    """Makes a run with one checkpoint that has only random parameters."""
    import dataclasses

    import jax
    import numpy as np

    from jaxlm import config, models
    from jaxlm.config import config_files
    from jaxlm.data.tokenizer import coder
    from jaxlm.data.tokenizer.train import train_tokenizer
    from jaxlm.devices import tree
    from jaxlm.models import hardware
    from jaxlm.run.checkpoints import saving
    from jaxlm.run.workdir import TOKENIZER

    given = config_files.load(name, [f"workdir={run}", f"data.dir={run / 'data'}"])
    if not given.model.vocab_size:  # 0: set by the data
        given.model.vocab_size = 8192
    c = config.resolve(given)
    rng = np.random.default_rng(0)

    def draw(path: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.numpy.asarray(0.02 * rng.standard_normal(leaf.shape, np.float32) + path.endswith("scale"))

    model = models.build(hardware.for_platform(c.model, "cpu"), "xla")
    saving.save_weights(
        run / "checkpoints", lambda: tree.map_named(draw, models.abstract_params(model)), dataclasses.asdict(c)
    )
    words = random.Random(0)
    texts = [
        " ".join("".join(words.choices("abcdefghijklmnopqrstuvwxyz", k=words.randint(3, 9))) for _ in range(200))
        for _ in range(300)
    ]
    size, chats = c.model.vocab_size, c.data.chat_tokens
    coder.write(train_tokenizer(texts, vocab_size=size, chat_tokens=chats), run / TOKENIZER)
    (run / "config.json").write_text(config.to_json(c))


def measure(run: pathlib.Path, out: pathlib.Path, to: str, dtype: str) -> dict:
    """Runs one export in its own process; returns the time and memory that it took."""
    command = [
        sys.executable,
        "-m",
        "jaxlm.cli.cli",
        "export",
        str(run),
        f"--to={to}",
        f"--dtype={dtype}",
        f"--out={out}",
    ]
    child = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True)
    said = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} ended with status {status}")
    size = sum(path.stat().st_size for path in out.iterdir())
    shutil.rmtree(out)
    found = {key: value for key, value in json.loads(said.splitlines()[-1]).items() if key.endswith("_s")}
    cpu = round(usage.ru_utime + usage.ru_stime)
    return found | {"cpu_s": cpu, "peak_gb": round(usage.ru_maxrss * 1024 / 1e9, 2), "gb": round(size / 1e9, 2)}


def export(word: str) -> tuple[str, str]:
    """Returns (format, dtype) of an argument such as gguf:q8_0."""
    to, colon, dtype = word.partition(":")
    if not (to in ("hf", "gguf") and colon and dtype):
        raise argparse.ArgumentTypeError(f"{word!r} is no export: hf:bf16, gguf:f16, gguf:q8_0, ...")
    return to, dtype


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="of the run and the exports")
    parser.add_argument("config", nargs="?", default="gpuburnout_1b")
    parser.add_argument("exports", nargs="*", type=export, metavar="TO:DTYPE", help="hf:bf16, gguf:f16, gguf:q8_0, ...")
    args = parser.parse_args()
    run = args.folder.absolute() / "run"
    if os.environ.get("MAKE") == "1":
        make(run, args.config)
        return
    if not (run / "config.json").is_file():
        run.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, *sys.argv], env=os.environ | {"MAKE": "1"}, check=True)
    for to, dtype in args.exports or (("hf", "bf16"), ("gguf", "f16"), ("gguf", "q8_0")):
        load = os.getloadavg()[0]
        print(
            f"{to}:{dtype}",
            json.dumps(measure(run, run.parent / "out", to, dtype) | {"load": round(load, 1)}),
            flush=True,
        )


if __name__ == "__main__":
    main()
