"""The package itself: what an older Python is told."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
INIT = ROOT / "jaxlm/__init__.py"


def test_an_older_python_can_read_what_refuses_it():
    """Its first two statements are all that runs there: standard library alone, in a syntax that Python 3.6 knows."""
    tree = ast.parse(INIT.read_text(), feature_version=(3, 6))
    about, imports, refusal, *_ = tree.body
    assert isinstance(about, ast.Expr)
    assert [name.name for name in imports.names] == ["sys"]
    assert isinstance(refusal, ast.If)


@pytest.mark.parametrize("module", ["jaxlm.main", "jaxlm.cli"])
@pytest.mark.parametrize(("version", "code"), [((3, 10, 12), 2), ((3, 11, 0), 0)])
def test_an_older_python_is_refused_in_one_line(module, version, code):
    pretend = f"import runpy, sys; sys.version_info = {version}; sys.argv[1:] = ['--help']; "
    run = f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    done = subprocess.run([sys.executable, "-c", pretend + run], cwd=ROOT, capture_output=True, text=True, timeout=60)
    said = "" if code == 0 else "jaxlm needs Python 3.11 or newer; this is Python 3.10\n"
    assert (done.returncode, done.stderr) == (code, said)
