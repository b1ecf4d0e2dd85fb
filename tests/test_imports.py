"""Imports go down the rooms of CONTRIBUTING.md, never up and never in a circle (pyproject.toml, import-linter)."""

import pathlib
import shutil
import subprocess
import sys

import grimp
import pytest
from documented import ROOT

LINT = (sys.executable, "-c", "from importlinter.cli import lint_imports_command as lint; lint()", "--no-cache")


def lint(folder: pathlib.Path) -> tuple[int, str]:
    """Exit code and words of `lint-imports` on the package in a folder."""
    done = subprocess.run(LINT, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def copy(tmp_path):
    """A copy of the package, to add bad lines to."""
    shutil.copytree(ROOT / "jaxlm", tmp_path / "jaxlm", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_imports_go_down_the_rooms():
    code, said = lint(ROOT)
    assert code == 0, said


def test_an_import_that_goes_up_or_in_a_circle_is_caught(copy):
    for path, line in {
        "ops/rope.py": "from jaxlm.models import layers",
        "plan/memory.py": "def f():\n    from jaxlm.train import loop",
        "eval/harness.py": "if TYPE_CHECKING:\n    from jaxlm.interop import hf_config",
        "train/hooks.py": "from jaxlm.train import loop",
        "train/loop.py": "from jaxlm.train import hooks",
        "room/new.py": "",
    }.items():
        (copy / "jaxlm" / path).parent.mkdir(exist_ok=True)
        with (copy / "jaxlm" / path).open("a") as file:
            file.write(f"\n{line}\n")
    (copy / "jaxlm/room/__init__.py").touch()
    code, said = lint(copy)
    assert code == 1
    assert "jaxlm.ops.rope -> jaxlm.models.layers" in said
    assert "jaxlm.plan.memory -> jaxlm.train.loop" in said
    assert "jaxlm.eval.harness -> jaxlm.interop.hf_config" in said
    assert "No cycles are allowed in jaxlm.train" in said
    assert "room" in said


def through_its_package(graph: grimp.ImportGraph) -> list[str]:
    """A line for each module that imports a package around it whose __init__ leads back to it: no siblings, so not linted."""
    lines = []
    for module in graph.modules:
        parts = module.split(".")
        for around in {".".join(parts[:n]) for n in range(1, len(parts))} & graph.find_modules_directly_imported_by(
            module
        ):
            if way := graph.find_shortest_chain(importer=around, imported=module):
                lines.append(" -> ".join((module, *way)))
    return lines


def test_no_circle_goes_through_a_package_around_a_module():
    graph = grimp.build_graph("jaxlm", exclude_type_checking_imports=False, cache_dir=None)
    assert through_its_package(graph) == []
    graph.add_import(importer="jaxlm.config.schema", imported="jaxlm.config")
    assert through_its_package(graph) == ["jaxlm.config.schema -> jaxlm.config -> jaxlm.config.schema"]


def test_linen_is_imported_in_models_only():
    graph = grimp.build_graph("jaxlm", include_external_packages=True, cache_dir=None)
    users = {module for module in graph.find_modules_that_directly_import("flax") if ".configs." not in module}
    assert users
    assert {module.split(".")[1] for module in users} == {"models"}


# One process each, which imports them in this order: modules -> what is not there after them.
STARTS = [
    {
        "host.child": "jax numpy jaxlm.config",
        "cli.cli config.key_help host.console data.batches.which_data run.survive.supervisor": (
            "jax flax orbax datatrove pyarrow numpy"
        ),
        # Grain takes a second.
        "commands.sample commands.chat commands.serve commands.eval commands.export commands.report commands.trace": (
            "grain jaxlm.data.batches.loader"
        ),
        # tensorboardX imports PyTorch where there is one: seconds of every start.
        "commands.train.text commands.train.posttraining commands.train.rewards": (
            "tensorboardX torch datatrove loguru duckdb resiliparse sklearn wandb"
        ),
    },
    {
        "commands.prepare commands.tokenize commands.audit commands.compare commands.diff commands.trace": (
            "jax flax orbax grain"
        )
    },
    {
        "train.rl.judges": "jax numpy jaxlm.config",
        "run.checkpoints.mirror_worker run.ledger run.spent run.metrics": "jax",
    },
]


@pytest.mark.parametrize("starts", STARTS)
def test_a_start_imports_no_library_that_it_does_not_use(starts):
    lines = (f"import {', '.join(f'jaxlm.{m}' for m in modules.split())}; print(*sys.modules)" for modules in starts)
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(["import sys", *lines])], capture_output=True, text=True, check=True
    )
    for loaded, (modules, never) in zip(done.stdout.splitlines(), starts.items(), strict=True):
        assert not set(loaded.split()) & set(never.split()), modules
