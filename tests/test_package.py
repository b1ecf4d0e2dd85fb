"""The package itself: what an older Python is told, and what a plain install brings."""

import ast
import os
import pathlib
import subprocess
import sys
import tomllib
from importlib import metadata

import pytest
from packaging.requirements import Requirement

ROOT = pathlib.Path(__file__).resolve().parents[1]
INIT = ROOT / "jaxlm/__init__.py"


def test_an_older_python_can_read_what_refuses_it():
    """Its first two statements are all that runs there: standard library alone, in a syntax that Python 3.6 knows."""
    tree = ast.parse(INIT.read_text(), feature_version=(3, 6))
    about, imports, refusal, *_ = tree.body
    assert isinstance(about, ast.Expr)
    assert [name.name for name in imports.names] == ["sys"]
    assert isinstance(refusal, ast.If)


@pytest.mark.parametrize("module", ["jaxlm.main", "jaxlm.cli.cli"])
@pytest.mark.parametrize(("version", "code"), [((3, 10, 12), 2), ((3, 11, 0), 0)])
def test_an_older_python_is_refused_in_one_line(module, version, code):
    pretend = f"import runpy, sys; sys.version_info = {version}; sys.argv[1:] = ['--help']; "
    run = f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    done = subprocess.run([sys.executable, "-c", pretend + run], cwd=ROOT, capture_output=True, text=True, timeout=60)
    said = "" if code == 0 else "jaxlm needs Python 3.11 or newer; this is Python 3.10\n"
    assert (done.returncode, done.stderr) == (code, said)


def installed() -> set[str]:
    """The packages that `pip install -e .` brings, without an extra."""
    found, open_ = set(), tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    while open_:
        one = Requirement(open_.pop())
        name = one.name.lower().replace("_", "-")
        if name not in found and (one.marker is None or one.marker.evaluate({"extra": ""})):
            found.add(name)
            open_ += metadata.requires(name) or []
    return found


def test_chats_can_be_written_after_a_plain_install():
    """Fine-tuning is in README's first commands: no package of an extra is imported where its examples are rendered."""
    kept = installed()
    names = metadata.packages_distributions().items()
    other = [module for module, by in names if not {name.lower().replace("_", "-") for name in by} & kept]
    program = f"""
import sys
class Missing:
    def find_spec(name, path=None, target=None):
        if name in {sorted(set(other) - {"jaxlm"})}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing)
import tiny_chats
from jaxlm.data.chats import chat
print(chat.render(tiny_chats.tokenizer(), [{{"role": "user", "content": "hello"}}]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "<|im_start|><|user|>\nhello<|im_end|>" in done.stdout, done.stderr[-2000:]
