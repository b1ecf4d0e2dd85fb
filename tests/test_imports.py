"""Imports go down the floors, never up (DESIGN): each module may import only lower floors and its own."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
FLOORS = {
    "jaxlm.config": 0,
    "jaxlm.config_files": 0,
    "jaxlm.console": 0,
    "jaxlm.files": 0,
    "jaxlm.processes": 0,
    "jaxlm.tree": 0,
    "jaxlm.sharding": 0,
    "jaxlm.xla_flags": 0,
    "jaxlm.corpus": 1,
    "jaxlm.ops": 1,
    "jaxlm.data": 2,
    "jaxlm.models": 2,
    "jaxlm.train.adam": 3,
    "jaxlm.train.step": 3,
    "jaxlm.train.optim": 3,
    "jaxlm.train.state": 3,
    "jaxlm.train.pretraining": 3,
    "jaxlm.objectives": 3,
    "jaxlm.plan": 3,
    "jaxlm.train": 4,
    "jaxlm.eval": 4,
    "jaxlm.report": 4,
    "jaxlm.interop": 4,
    "jaxlm.programs": 5,
    "jaxlm.main": 6,
    "jaxlm.cli": 6,
}


def floor(module: str) -> int:
    """The floor of the longest listed prefix."""
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        if ".".join(parts[:end]) in FLOORS:
            return FLOORS[".".join(parts[:end])]
    raise AssertionError(f"{module} stands on no floor: add it to FLOORS")


def imported(source: str, modules: set[str]) -> set[str]:
    """Modules of jaxlm that a source file imports."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("jaxlm.")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jaxlm":
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in modules else node.module)
    return found - {"jaxlm"}


def modules() -> dict[str, str]:
    """Module name -> source, configs left out."""
    result = {}
    for path in sorted((ROOT / "jaxlm").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if not name.startswith("jaxlm.configs"):
            result[name] = path.read_text()
    return result


def violations(sources: dict[str, str]) -> list[str]:
    """Imports that go up, or sideways into another folder."""
    bad = []
    for name, source in sources.items():
        for other in imported(source, set(sources)) if name != "jaxlm" else ():
            same_folder = name.split(".")[:2] == other.split(".")[:2]
            lower = floor(other) < floor(name) or (floor(other) == floor(name) and floor(name) in (0, 3, 4, 5, 6))
            if not (lower or (same_folder and floor(other) <= floor(name))):
                bad.append(f"{name} (floor {floor(name)}) imports {other} (floor {floor(other)})")
    return bad


def test_imports_go_down():
    assert not violations(modules())


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("jaxlm.ops.rope", "from jaxlm.models import llama"),
        ("jaxlm.train.step", "from jaxlm.train import loop"),
        ("jaxlm.data.rows", "from jaxlm.models import layers"),
        ("jaxlm.corpus.stage", "from jaxlm.data import shards"),
    ],
)
def test_an_import_that_goes_up_is_caught(module, line):
    sources = modules()
    sources[module] += f"\n{line}\n"
    assert violations(sources)


def test_linen_is_imported_in_models_only():
    users = {name for name, source in modules().items() if "flax" in source and "import" in source.split("flax")[0]}
    linen = {
        name
        for name in users
        if any(
            "flax" in ast.unparse(n)
            for n in ast.walk(ast.parse(modules()[name]))
            if isinstance(n, (ast.Import, ast.ImportFrom))
        )
    }
    assert linen
    assert all(name.startswith("jaxlm.models") for name in linen)


def test_defaults_live_in_base_only():
    for name, source in modules().items():
        if not name.startswith("jaxlm.config"):
            assert "config.get(" not in source, name
