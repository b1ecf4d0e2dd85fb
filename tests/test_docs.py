"""What the project says of itself is what it does."""

import pathlib
import re
import shlex
import tomllib

import documented
from documented import ROOT

from jaxlm.cli import cli, verbs
from jaxlm.config import config_files

README, CONTRIBUTING = ((ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md"))
PAGES = [ROOT / "CONTRIBUTING.md", *documented.PAGES]


def test_ci_runs_the_commands_of_the_readme():
    ci = (ROOT / ".ci/run").read_text()
    first, second = re.findall(r"^    (pip install -e .+)$", README, re.MULTILINE)[:2]
    for command in (*first.split(" && "), *second.split(" && ")):
        normal = command.replace("pip install", "pip install -q").replace("runs/quickstart", '"$place/quickstart"')
        assert normal in ci, command


def test_the_readme_names_every_shipped_config_and_every_verb():
    for name in config_files.shipped_configs():
        assert f"`{name}`" in README, name
    for verb in verbs.VERBS:
        assert f"`{verb}`" in README or f"jaxlm {verb}" in README, verb


def test_the_faq_answers_with_what_there_is():
    faq = (ROOT / "docs/faq.md").read_text()
    for verb in ("train sft", "train dpo", "train reward", "eval", "compare", "export"):
        assert f"jaxlm {verb}" in " ".join(faq.split()), verb


def test_a_long_page_begins_with_what_to_type():
    long = [page for page in (ROOT / "docs").glob("*.md") if len(page.read_text().splitlines()) > 80]
    assert long
    for page in long:
        _, table, _ = page.read_text().split("\n\n", 2)
        head, _, *rows = table.splitlines()
        assert head == "| you want | type |", page.name
        assert 4 <= len(rows) <= 10, page.name
        assert all(row.count(" | ") == 1 and ("`" in row or "ctrl-C" in row) for row in rows), page.name


def test_links_in_the_docs_lead_somewhere():
    links = [(page, target) for page in PAGES for target in re.findall(r"\]\(([^)#]+)\)", page.read_text())]
    assert len(links) > 5
    for page, target in links:
        assert target.startswith("http") or (page.parent / target).exists(), (page.name, target)


def files(text: str) -> list[str]:
    """Files of the project that a page names, by their whole path or by that below jaxlm/."""
    whole = re.findall(r"(?<![\w/.])((?:jaxlm|tests|scripts|configs|docs|dev)/[\w/]+\.(?:py|md|toml|json))", text)
    below = re.findall(
        r"`((?:cli|commands|step|train|run|models|data|plan|eval|serve|interop|report|ops|corpus|devices|config|host)/[\w/]+\.py)`",
        text,
    )
    return [path for path in [*whole, *(f"jaxlm/{path}" for path in below)] if "NAME" not in path]


def test_files_named_in_the_docs_exist():
    named = [(page.name, path) for page in PAGES for path in files(page.read_text())]
    assert len(named) > 50
    assert not [(page, path) for page, path in named if not (ROOT / path).is_file()]


def test_files_are_found_in_a_page():
    text = "(`tests/train/test_fp8.py`), `train/hooks.py`; python scripts/a.py --out=b; `models/NAME.py`"
    assert files(text) == ["tests/train/test_fp8.py", "scripts/a.py", "jaxlm/train/hooks.py"]


def test_the_map_has_every_room_from_the_top_down():
    drawn = re.search(r"^## The map$.*?^```$(.*?)^```$", CONTRIBUTING, re.MULTILINE | re.DOTALL)[1]
    rooms = re.findall(r"^(\w+)/", drawn.replace("main  cli/", "main/\ncli/"), re.MULTILINE)
    layers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
    assert rooms == " ".join(layers).replace("|", " ").split()
    named = set(re.findall(r"(\w+)/", drawn))
    folders = {path.parent.name for path in (ROOT / "jaxlm").rglob("*/__init__.py") if "configs" not in path.parts}
    assert folders - {"jaxlm"} == named


def test_what_the_readme_shows_below_a_command_is_what_it_prints(capsys):
    shown = re.findall(r"^\$ jaxlm (.*)\n((?:.+\n)+?)```", README, re.MULTILINE)
    assert shown
    for command, output in shown:
        cli.main(shlex.split(command))
        assert "".join(capsys.readouterr()) == output


def test_keys_named_in_the_docs_exist():
    base = config_files.load("base")
    keys = set(config_files.flat_keys(base))
    sections = (
        "model|data|train|loss|optim|checkpoint|eval|sample|mesh|log|hardware|distributed|plan|tune|profile|prepare"
    )
    pattern = rf"`(?:--config\.)?((?:{sections})\.[a-z0-9_.]*[a-z0-9_])"
    named = [
        (f"{page.name}:{number}", key)
        for page in [*PAGES, documented.LEADERBOARD]
        if page.name != "coming_from.md"  # other trainers' keys; tests/config/test_theirs.py
        for number, line in enumerate(page.read_text().splitlines(), 1)
        for key in re.findall(pattern, line)
    ]
    assert len(named) > 20
    assert not [(place, key) for place, key in named if key not in keys]


def test_no_path_of_a_developers_machine():
    skipped = {".git", ".venv", "jaxlm.egg-info", "__pycache__", "runs", "build"}
    own, read = pathlib.Path(__file__).resolve(), 0
    for path in ROOT.rglob("*"):
        skip = skipped & set(path.relative_to(ROOT).parts) or path.resolve() == own
        if path.suffix in (".py", ".md", ".toml", ".sh") and path.is_file() and not skip:
            assert not re.search(r"(?<![\w.])/(home|root|work|Users)/", path.read_text()), path
            read += 1
    assert read > 200
