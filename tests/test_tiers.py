"""Plain `pytest` needs `.[test]` alone and leaves out subjects that `.ci/run` runs after it."""

import ast
import pathlib
import re
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SUBJECTS = {"faults", "parity", "engines", "browser", "recipe", "scripts"}


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
    assert set(re.search(r'^tests -m "(.*?)"', ci, re.M)[1].split(" or ")) == SUBJECTS
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert set(re.findall(r"^@pytest\.mark\.(\w+)$", tests, re.M)) >= SUBJECTS


def test_pytest_needs_nothing_of_parity():
    assert extra("test") >= {"pytest", "pytest-xdist", "ruff", "ray"}
    assert {"torch", "transformers"} <= extra("parity")
    assert not extra("test") & extra("parity")


def test_the_longest_files_are_there():
    tree = ast.parse((ROOT / "tests/conftest.py").read_text())
    (names,) = [
        ast.literal_eval(n.value)
        for n in tree.body
        if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "LONGEST"
    ]
    assert set(names) <= {path.name for path in (ROOT / "tests").rglob("test_*.py")}
