"""Installs the wheel in a fresh environment of each Python that is here, and trains there; says what was not tried.

    python scripts/check_install.py            # minutes and 1.3 GB for each Python

In each: the wheel, then `jaxlm train quickstart`, shrunk, from an empty folder. In the first also the Dockerfile's pip
lines on what it copies, and the notebook's first cells where it lies. Python 3.10 must be refused.
"""

import argparse
import json
import os
import pathlib
import re
import shlex
import shutil
import site
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
SMALL = [  # makes the quickstart a matter of seconds
    *("train.steps=2", "train.batch_size=1", "train.seq_len=32", "train.eval_every_steps=0", "model.n_layers=1"),
    *("model.d_model=32", "model.d_ff=64", "model.vocab_size=512", "optim.warmup_steps=1", "eval.at_start=False"),
    *("eval.max_mb=0.001", "sample.max_new_tokens=4"),
    *(f"prepare.sources.{name}.max_bytes=200_000" for name in ("prose", "math", "code")),
]


def run(*words: object, folder: pathlib.Path, venv: pathlib.Path | None = None, code: int = 0) -> str:
    """Runs a command, or one text of the shell, with the venv's programs; returns what it prints. Ends if it fails."""
    hidden = {"PYTHONPATH", "VIRTUAL_ENV", "PIP_REQUIRE_VIRTUALENV"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden} | {"JAX_PLATFORMS": "cpu"}
    if venv:
        environment["PATH"] = f"{venv / 'bin'}{os.pathsep}{environment['PATH']}"
    command = ["sh", "-c", words[0]] if len(words) == 1 else [str(word) for word in words]
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode != code:
        sys.exit(f"{' '.join(map(str, words))}: ended with {done.returncode}, not {code}\n{done.stdout[-3000:]}")
    return done.stdout


def python(version: str) -> str | None:
    """Returns the path of a Python on PATH, None if there is none that starts (pyenv's may refuse)."""
    there = shutil.which(f"python{version}")
    begun = there and subprocess.run([there, "-c", "import sys; print(sys.executable)"], capture_output=True, text=True)
    return begun.stdout.strip() if begun and begun.returncode == 0 else None


def environment(version: str, folder: pathlib.Path, reuse: bool = False) -> pathlib.Path:
    """Makes a virtual environment. `reuse`: it sees the packages of the one that runs this."""
    venv = folder / version
    run(python(version), "-m", "venv", venv, folder=folder)
    if reuse:
        (place,) = venv.glob("lib/python*/site-packages")
        (place / "here.pth").write_text("\n".join(site.getsitepackages()))
    return venv


def install(wheel: pathlib.Path, venv: pathlib.Path, folder: pathlib.Path) -> str:
    """Installs the wheel and trains from an empty folder; returns what it took, in words."""
    empty, began = folder / f"empty-{venv.name}", time.perf_counter()
    empty.mkdir()
    run("pip", "install", "-q", wheel, folder=empty, venv=venv)
    took, size = time.perf_counter() - began, sum(path.lstat().st_size for path in venv.rglob("*") if path.is_file())
    place = run("python", "-c", "import jaxlm; print(jaxlm.__file__)", folder=empty, venv=venv)
    assert place.startswith(str(venv)), place
    run("jaxlm", "train", "quickstart", *(f"--config.{key}" for key in SMALL), folder=empty, venv=venv)
    return f"wheel installed in {took:.0f} s ({size / 1e9:.2f} GB), quickstart trained, shrunk"


def notebook(source: pathlib.Path, venv: pathlib.Path) -> str:
    """Runs the notebook's cells to the first that installs, where it lies in the checkout; returns what that installed."""
    content = json.loads((source / "notebooks/quickstart.ipynb").read_text())
    first, installs = ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == "code"][:2]
    package = run("python", "-c", f"{first}\nprint(package)", folder=source / "notebooks", venv=venv).strip()
    assert package == str(source), package
    run(installs.removeprefix("!").replace("{package}", package), folder=source / "notebooks", venv=venv)
    return installs


def refused(source: pathlib.Path, folder: pathlib.Path) -> str:
    """Returns the line with which an install into Python 3.10 ends, and jaxlm where it is not installed."""
    if not (old := python("3.10")):
        return "not tried, none on PATH"
    said = run("pip", "install", ".", folder=source, venv=environment("3.10", folder), code=1)
    line = run(old, "-m", "jaxlm.main", folder=source, code=2).strip()
    assert line in said, said
    return f"refused: {line}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pythons", default="3.11,3.12,3.13", help="which are tried, with commas between")
    parser.add_argument("--reuse", action="store_true", help="see the packages that are installed here, download none")
    args = parser.parse_args(argv)
    docker, trained = (ROOT / "Dockerfile").read_text(), []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name).resolve()
        (source := folder / "source").mkdir()
        copied = " ".join(re.findall(r"^COPY (.*) \S+$", docker, re.M))
        run(f"cp -RP {copied} notebooks setup.py {shlex.quote(str(source))}", folder=ROOT)
        run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", f"--wheel-dir={folder}", ".", folder=source)
        (wheel,) = folder.glob("*.whl")
        for version in args.pythons.split(","):
            if not python(version):
                print(f"Python {version}: not tried, none on PATH", flush=True)
                continue
            venv = environment(version, folder, args.reuse)
            print(f"Python {version}: {install(wheel, venv, folder)}", flush=True)
            if not trained:
                for line in re.findall(r"^RUN (pip .*)$", docker, re.M):
                    run(line, folder=source, venv=venv)
                    print(f"Dockerfile: {line}", flush=True)
                print(f"notebook: {notebook(source, venv)}", flush=True)
            trained.append(version)
            shutil.rmtree(venv)
        print(f"Python 3.10: {refused(source, folder)}")
    sys.exit(0 if trained else "no Python of these is on PATH")


if __name__ == "__main__":
    main()
