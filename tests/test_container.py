"""The Dockerfile and the notebook run the README's quickstart, as far as that shows without Docker, Jupyter or a network."""

import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tomllib
import types

import pytest
from check_install import SMALL
from documented import ROOT

from jaxlm.config import config_files

README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
KNOWN = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "USER", "VOLUME", "CMD"}


def instructions(text: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile with their arguments."""
    joined = re.sub(r"\\\n", "", re.sub(r"^#.*\n", "", text, flags=re.M))
    return [tuple(line.split(None, 1)) for line in joined.splitlines() if line.strip()]


DOCKERFILE = instructions((ROOT / "Dockerfile").read_text())


def meaning(command: str) -> tuple[pathlib.Path, list[str]]:
    """What a command that trains a shipped config means: (its file, its overrides)."""
    words = shlex.split(command)
    words = words[3:] if words[0] == "python" else words[2:]
    given, overrides = [word for word in words if "config." not in word[:9]], [w for w in words if "config." in w[:9]]
    name = given[0].removeprefix("--config=")
    return config_files.find(str(ROOT / name) if "/" in name else name).path.resolve(), overrides


def of_the_readme() -> tuple[str, tuple[pathlib.Path, list[str]]]:
    install, train = re.search(r"^    (pip install .+) && (python -m jaxlm.main .+)$", README, re.M).groups()
    return install, meaning(train)


def test_every_instruction_of_the_dockerfile_is_known_and_what_it_copies_exists():
    assert {name for name, _ in DOCKERFILE} == KNOWN
    copied = [word for name, rest in DOCKERFILE if name == "COPY" for word in rest.split()[:-1]]
    assert {"configs", "jaxlm", "pyproject.toml"} <= set(copied)  # jaxlm/configs is a link to configs
    for word in copied:
        assert (ROOT / word).exists(), word
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert kept == set(copied)


def test_the_dockerfile_installs_and_runs_what_the_readme_does_and_not_as_root():
    install, train = of_the_readme()
    said = dict(DOCKERFILE)
    assert meaning(shlex.join(json.loads(said["CMD"]))) == train
    installs = [rest for name, rest in DOCKERFILE if name == "RUN" and "pip install" in rest]
    assert install == "pip install -e ."
    assert installs == ['pip install --no-cache-dir ".${EXTRA:+[$EXTRA]}"']
    for extra, asked in (("", "."), ("cuda12", ".[cuda12]")):  # what the shell makes of the build argument
        echo = ["sh", "-c", installs[0].replace("pip install --no-cache-dir", "echo")]
        assert subprocess.run(echo, env={"EXTRA": extra}, capture_output=True, text=True).stdout.strip() == asked
    assert (said["USER"], said["VOLUME"]) == ("jaxlm", f"{said['WORKDIR']}/runs")
    # The last line that changes anything is not root's: what is copied and installed comes before.
    order = [name for name, _ in DOCKERFILE]
    assert order.index("USER") > max(i for i, name in enumerate(order) if name in ("RUN", "COPY"))


def test_the_python_of_the_dockerfile_and_the_extras_it_names_are_the_projects():
    text = (ROOT / "Dockerfile").read_text()
    assert f"ARG PYTHON={PROJECT['requires-python'].removeprefix('>=')}" in text
    assert set(re.findall(r"EXTRA=(\w+)", text)) <= PROJECT["optional-dependencies"].keys()


def cells() -> list[str]:
    """The code of the notebook's cells."""
    notebook = json.loads((ROOT / "notebooks/quickstart.ipynb").read_text())
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["language"]) == (4, "python")
    assert all(not cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code")
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_trains_what_the_readme_trains_and_refuses_a_source_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (line,) = [cell for cell in cells() if cell.startswith("!jaxlm train")]
    assert meaning(line[1:].replace("{OVERRIDES}", "").strip()) == of_the_readme()[1]
    with pytest.raises(AssertionError, match="upload a checkout"):
        exec(cells()[0], {})
    names = {}
    exec(cells()[0].replace('"jaxlm"', '"git+https://example.com/x"', 1).replace('EXTRA = ""', 'EXTRA = "tpu"'), names)
    assert names["package"] == "jaxlm[tpu] @ git+https://example.com/x"
    (tmp_path / "notebooks").mkdir()  # opened where it lies
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path / "notebooks")
    exec(cells()[0], names)
    assert names["package"] == str(tmp_path)


@pytest.mark.recipe
def test_the_notebook_runs_from_top_to_bottom(tmp_path, monkeypatch):
    """As Jupyter runs it, `!` being a shell; with fewer steps, and without the network that pip wants."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jaxlm").symlink_to(ROOT)
    displayed = types.ModuleType("IPython.display")
    shown: list[str] = []
    displayed.HTML, displayed.display = str, shown.append
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", displayed)
    names, ran = {}, []
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    for cell in cells():
        if not cell.startswith("!"):
            exec(cell, names)
            names |= {"OVERRIDES": " ".join(f"--config.{one}" for one in SMALL)} if "OVERRIDES" in names else {}
            continue
        verb, *words = shlex.split(cell[1:].format(**names))
        ran.append([verb, *words])
        if verb == "jaxlm":
            subprocess.run([sys.executable, "-m", "jaxlm.cli.cli", *words], env=environment, check=True, timeout=300)
    assert [one[:2] for one in ran] == [["pip", "install"], ["jaxlm", "train"], ["jaxlm", "sample"]]
    assert ran[0][-1] == str(tmp_path / "jaxlm")
    run, data = shown
    assert "Run quickstart" in run
    assert "Data report" in data
