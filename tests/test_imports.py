"""Imports go down the floors, never up and never in a circle (scripts/import_graph.py holds the rules)."""

import ast
import pathlib
import subprocess
import sys
import xml.etree.ElementTree

import import_graph
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
# A package that keeps every rule, with an import of each kind that is allowed.
CLEAN = {
    "jaxlm/__init__.py": "",
    "jaxlm/main.py": "from jaxlm import cli",
    "jaxlm/cli/cli.py": "import jaxlm.commands.sample",
    "jaxlm/config/__init__.py": "from jaxlm.config.schema import Config",
    "jaxlm/config/schema.py": "",
    "jaxlm/config/build.py": "from jaxlm.config import schema",
    "jaxlm/devices/sharding.py": "from jaxlm.config import Config",
    "jaxlm/ops/rope.py": "from jaxlm import sharding",
    "jaxlm/corpus/stage.py": "",
    "jaxlm/corpus/stages/__init__.py": "from jaxlm.corpus import stage",
    "jaxlm/corpus/stages/html.py": "from jaxlm.corpus import stage, stages",
    "jaxlm/corpus/prepare.py": "from jaxlm.corpus import stages",
    "jaxlm/models/llama.py": "from jaxlm.ops.rope import rotate",
    "jaxlm/data/batches/rows.py": "from jaxlm.config import ConfigError",
    "jaxlm/step/objectives/base.py": "from jaxlm.models import llama",
    "jaxlm/step/step.py": "from jaxlm.step.objectives import base",
    "jaxlm/plan/memory.py": "from jaxlm.step import step",
    "jaxlm/train/loop.py": "from jaxlm.plan import memory\nfrom jaxlm.run.checkpoints import store",
    "jaxlm/run/ledger.py": "",
    "jaxlm/run/checkpoints/store.py": "from jaxlm.plan import memory",
    "jaxlm/eval/held_out.py": "from jaxlm.train import loop",
    "jaxlm/interop/hf.py": "",
    "jaxlm/commands/sample.py": "import jaxlm\nfrom jaxlm.eval import loss",
}


def with_line(path: str, line: str) -> list[str]:
    """What is wrong with the clean package after one more line."""
    return import_graph.violations(CLEAN | {path: f"{CLEAN.get(path, '')}\n{line}\n"})


def test_imports_go_down_the_floors():
    wrong = import_graph.violations(import_graph.read(ROOT))
    assert not wrong, "\n".join(wrong)


def test_the_reader_sees_the_whole_package():
    sources = import_graph.read(ROOT)
    assert not [path for path in sources if "configs" in path.split("/")]
    assert {import_graph.unit(path) for path in sources} >= {"cli", "programs", "train", "models", "corpus", "config"}
    graph, _ = import_graph.imports(sources)
    assert "jaxlm/config/schema.py" in graph["jaxlm/config/__init__.py"]
    assert sum(map(len, graph.values())) > 200


def test_what_is_allowed_passes():
    assert import_graph.violations(CLEAN) == []


@pytest.mark.parametrize(
    ("path", "line", "found"),
    [
        ("jaxlm/ops/rope.py", "from jaxlm.models import llama", "imports jaxlm/models/llama.py (floor 2): up"),
        ("jaxlm/step/step.py", "from jaxlm.plan import memory", "imports jaxlm/plan/memory.py (floor 4): up"),
        ("jaxlm/devices/sharding.py", "import jaxlm.ops.rope", "imports jaxlm/ops/rope.py (floor 1): up"),
        ("jaxlm/ops/rope.py", "from ..models import llama", "imports jaxlm/models/llama.py (floor 2): up"),
        ("jaxlm/ops/rope.py", "import importlib\nimportlib.import_module('jaxlm.models.llama')", "(floor 2): up"),
        ("jaxlm/ops/rope.py", "if TYPE_CHECKING:\n    from jaxlm.models.llama import Llama", "(floor 2): up"),
        ("jaxlm/ops/rope.py", "def f():\n    from jaxlm.models import llama", "(floor 2): up"),
        ("jaxlm/run/ledger.py", "def f():\n    import jaxlm.commands.sample", "(floor 6): up"),
        ("jaxlm/data/batches/rows.py", "from jaxlm.models import llama", "both on floor 2: sideways"),
        ("jaxlm/interop/hf.py", "from jaxlm.eval import loss", "both on floor 5: sideways"),
        ("jaxlm/plan/memory.py", "from jaxlm.train import ledger", "both on floor 4: sideways"),
        ("jaxlm/step/objectives/base.py", "from jaxlm.step import step", "both on floor 3: sideways"),
        ("jaxlm/other/new.py", "", "stands on no floor"),
        ("jaxlm/eval/held_out.py", "from jaxlm.train.gone import x", "imports jaxlm.train.gone, which is not there"),
    ],
)
def test_an_import_that_goes_up_or_sideways_is_caught(path, line, found):
    assert any(path in wrong and found in wrong for wrong in with_line(path, line))


@pytest.mark.parametrize(
    ("path", "line", "found"),
    [
        ("jaxlm/config/schema.py", "from jaxlm import sharding", "circle of modules: jaxlm/config/__init__.py -> "),
        ("jaxlm/config/schema.py", "def f():\n    from jaxlm import config", "circle of modules: "),
        ("jaxlm/config/schema.py", "if TYPE_CHECKING:\n    from . import Config", "circle of modules: "),
        ("jaxlm/corpus/stage.py", "from jaxlm.corpus import prepare", "circle of modules: jaxlm/corpus/prepare.py -> "),
        # No circle of modules: the loop uses one module of the folder, another of them uses the loop.
        ("jaxlm/run/checkpoints/damage.py", "from jaxlm.train import loop", "checkpoints -> loop.py -> checkpoints"),
        ("jaxlm/corpus/stages/code.py", "from jaxlm.corpus import prepare", "prepare.py -> stages -> prepare.py"),
        ("jaxlm/config/extra.py", "from jaxlm import sharding", "circle of folders in jaxlm: config -> sharding.py"),
        ("jaxlm/plan/cost.py", "from jaxlm.train import ledger", "circle of folders in jaxlm: plan -> train -> plan"),
    ],
)
def test_a_circle_is_caught(path, line, found):
    assert any(found in wrong for wrong in with_line(path, line))


@pytest.mark.parametrize(
    ("path", "line", "found"),
    [
        ("jaxlm/run/checkpoints/store.py", "from jaxlm.train import loop", "up, into the folder around it"),
        (
            "jaxlm/run/checkpoints/keep.py",
            "from jaxlm.run.metrics import HELD_OUT",
            "up, into the folder around it",
        ),
        ("jaxlm/step/step.py", "from jaxlm.plan import memory", "(floor 4): up"),
        ("jaxlm/step/objectives/lm.py", "from jaxlm.step import state", "both on floor 3: sideways"),
        ("jaxlm/train/loop.py", "from jaxlm.train import hooks", "circle of modules: "),
    ],
)
def test_in_the_package_as_it_is_too(path, line, found):
    sources = import_graph.read(ROOT)
    wrong = import_graph.violations(sources | {path: f"{sources[path]}\n{line}\n"})
    assert any(path in line and found in line for line in wrong), wrong


def test_a_store_that_imports_the_loop_is_caught_in_one_folder_as_well():
    """As `train/checkpoint.py` once stood beside `train/loop.py`: same folder, same floor."""
    flat = {"jaxlm/train/loop.py": "from jaxlm.train import checkpoint", "jaxlm/train/checkpoint.py": ""}
    assert import_graph.violations(flat) == []
    flat["jaxlm/train/checkpoint.py"] = "from jaxlm.train.loop import run"
    (wrong,) = import_graph.violations(flat)
    assert wrong == ("circle of modules: jaxlm/train/checkpoint.py -> jaxlm/train/loop.py -> jaxlm/train/checkpoint.py")


@pytest.mark.parametrize(
    ("path", "lines", "wrong"),
    [
        ("jaxlm/programs/new.py", 149, []),
        ("jaxlm/programs/new.py", 150, ["jaxlm/programs/new.py has 150 lines; it must have fewer than 150"]),
        ("jaxlm/commands/train/run.py", 299, []),
        (
            "jaxlm/commands/train/run.py",
            300,
            ["jaxlm/commands/train/run.py has 300 lines; it must have fewer than 300"],
        ),
        ("jaxlm/eval/new.py", 599, []),
        ("jaxlm/eval/new.py", 600, ["jaxlm/eval/new.py has 600 lines; it must have fewer than 600"]),
    ],
)
def test_a_long_file_is_caught(path, lines, wrong):
    assert import_graph.violations(CLEAN | {path: "x = 1\n" * lines}) == wrong


def test_a_long_function_is_caught():
    assert not with_line("jaxlm/eval/new.py", "def f():\n" + "    x = 1\n" * 58)
    (wrong,) = with_line("jaxlm/eval/new.py", "def f():\n" + "    x = 1\n" * 59)
    assert "f has 60 lines" in wrong


def graph_of(root: pathlib.Path, *args: str) -> tuple[int, str]:
    """Exit code and output of the command, in a Python that has the standard library alone."""
    command = [sys.executable, "-I", "-S", str(ROOT / "scripts/import_graph.py"), f"--root={root}", *args]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


@pytest.fixture
def checkout(tmp_path) -> pathlib.Path:
    for path, text in CLEAN.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def test_the_command_draws_the_graph(checkout):
    code, said = graph_of(checkout)
    assert code == 0
    assert said.splitlines()[-1] == "no circle"
    (train,) = [line.split() for line in said.splitlines() if " train " in line]
    assert train == ["4", "train", "3", "modules", "->", "plan"]
    code, said = graph_of(checkout, "--dot")
    assert code == 0
    assert "  train -> plan;" in said
    picture = checkout / "graph.svg"
    assert graph_of(checkout, f"--svg={picture}")[0] == 0
    drawn = [node.text for node in xml.etree.ElementTree.parse(picture).iter() if node.tag.endswith("title")]
    assert "train → plan" in drawn
    assert "train → step" not in drawn  # plan imports it


def test_the_command_says_what_is_wrong(checkout):
    (checkout / "jaxlm/ops/rope.py").write_text("from jaxlm.models import llama")
    code, said = graph_of(checkout, f"--svg={checkout / 'graph.svg'}")
    assert code == 1
    assert "circle of modules: jaxlm/models/llama.py -> jaxlm/ops/rope.py -> jaxlm/models/llama.py" in said
    assert "jaxlm/ops/rope.py (floor 1) imports jaxlm/models/llama.py (floor 2): up" in said
    assert 'class="line bad"' in (checkout / "graph.svg").read_text()


def flax_users(sources: dict[str, str]) -> set[str]:
    """Paths of the modules that import Flax."""
    users = set()
    for path, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "flax" for name in names):
                users.add(path)
    return users


def test_linen_is_imported_in_models_only():
    users = flax_users(import_graph.read(ROOT))
    assert users
    assert {import_graph.unit(path) for path in users} == {"models"}
    assert flax_users({"a.py": "def f():\n    from flax import linen", "b.py": "import flax.linen as nn"}) == {
        "a.py",
        "b.py",
    }


def test_what_does_not_train_does_not_load_the_loader():
    """It imports Grain, which takes a second without JAX. `plan`, `doctor` and `tune` are of training."""
    verbs = ("sample", "chat", "serve", "eval", "export", "report", "diff", "compare", "trace", "tokenize", "prepare")
    code = f"import sys\nfrom jaxlm.commands import {', '.join(verbs)}\n"
    code += "print(sorted({'grain', 'jaxlm.data.batches.loader', 'jaxlm.data.ahead'} & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert found.stdout == "[]\n", found.stderr
