"""The package: what an older Python is told, what a plain install brings, what `pytest` runs and what `.ci/run` after it."""

import ast
import re
import runpy
import subprocess
import sys
import tomllib

import pytest
import tiny_installed
from documented import ROOT

INIT = ROOT / "jaxlm/__init__.py"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SUBJECTS = {"faults", "parity", "engines", "browser", "recipe", "scripts"}


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


def test_an_install_into_an_older_python_ends_with_the_same_line(monkeypatch):
    """Else pip blames a dependency that has no release for that Python."""
    ast.parse((ROOT / "setup.py").read_text(), feature_version=(3, 6))
    monkeypatch.setattr(sys, "version_info", (3, 10, 12))
    with pytest.raises(SystemExit, match=r"^jaxlm needs Python 3.11 or newer; this is Python 3.10$"):
        runpy.run_path(str(ROOT / "setup.py"))


def test_chats_can_be_written_after_a_plain_install():
    """Fine-tuning is in README's first commands: no package of an extra is imported where its examples are rendered."""
    program = "import tiny_chats; from jaxlm.data.chats import chat;"
    program += "print(chat.render(tiny_chats.tokenizer(), [{'role': 'user', 'content': 'hello'}]))"
    said = tiny_installed.run(program, tiny_installed.needed(PROJECT["project"]["dependencies"]))
    assert "<|im_start|><|user|>\nhello<|im_end|>" in said


def extra(name: str) -> set[str]:
    """Packages of an extra, with those of the extras that it names."""
    found = set()
    for line in PROJECT["project"]["optional-dependencies"][name]:
        inner = re.match(r"jaxlm\[(.*)\]", line)
        found |= set().union(*map(extra, inner[1].split(","))) if inner else {re.match(r"[\w.-]+", line)[0]}
    return found


def test_every_subject_is_left_out_by_pytest_and_run_by_ci():
    options = PROJECT["tool"]["pytest"]["ini_options"]
    assert {marker.partition(":")[0] for marker in options["markers"]} == SUBJECTS | {"shared"}
    assert set(re.search(r"-m 'not \((.*)\)'", options["addopts"])[1].split(" or ")) == SUBJECTS
    ci = (ROOT / ".ci/run").read_text()
    assert set(re.search(r'^tests .*-m "(.*?)"', ci, re.M)[1].split(" or ")) == SUBJECTS


def test_pytest_needs_nothing_of_parity():
    assert extra("test") >= {"pytest", "pytest-xdist", "ruff", "ray"}
    assert {"torch", "transformers"} <= extra("parity")
    assert not extra("test") & extra("parity")


def test_a_wheel_carries_the_files_that_are_no_python():
    carried = PROJECT["tool"]["setuptools"]["package-data"]
    folders = {ROOT / package.replace(".", "/"): names for package, names in carried.items()}
    for path in (ROOT / "jaxlm").rglob("*"):
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            assert any(path.match(name) for name in folders.get(path.parent, ())), path


def test_the_longest_files_are_there(pytestconfig):
    conftest = pytestconfig.pluginmanager.get_plugin(str(ROOT / "tests/conftest.py"))
    assert {*conftest.LONGEST} <= {path.name for path in (ROOT / "tests").rglob("test_*.py")}
