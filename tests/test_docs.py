"""What the project says of itself is what it does."""

import pathlib
import re

from jaxlm import cli, config_files

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_ci_runs_the_commands_of_the_readme():
    ci = (ROOT / ".ci/run").read_text()
    first, second = re.findall(r"^    (pip install -e .+)$", README, re.MULTILINE)[:2]
    for command in (*first.split(" && "), *second.split(" && ")):
        normal = command.replace("pip install", "pip install -q").replace("runs/quickstart", '"$place/quickstart"')
        assert normal in ci, command


def test_the_readme_names_every_shipped_config_and_every_verb():
    for name in config_files.shipped_configs():
        assert f"`{name}`" in README, name
    for verb in cli.VERBS:
        assert f"`{verb}`" in README or f"jaxlm {verb}" in README, verb


def test_links_in_the_docs_lead_somewhere():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    links = [(page, target) for page in pages for target in re.findall(r"\]\(([^)#]+)\)", page.read_text())]
    assert len(links) > 5
    for page, target in links:
        assert target.startswith("http") or (page.parent / target).exists(), (page.name, target)


def test_keys_named_in_the_docs_exist():
    base = config_files.load("base")
    keys = set(config_files.flat_keys(base))
    sections = "model|data|train|loss|optim|checkpoint|eval|sample|mesh|log|hardware|distributed|plan|tune|profile"
    pattern = rf"`(?:--config\.)?((?:{sections})\.[a-z0-9_.]+)"
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = [(page.name, key) for page in pages for key in re.findall(pattern, page.read_text())]
    assert len(named) > 20
    assert not [(page, key) for page, key in named if key not in keys]


def test_no_path_of_a_developers_machine():
    skipped = {".git", ".venv", "jaxlm.egg-info", "__pycache__", "runs", "build"}
    own, read = pathlib.Path(__file__).resolve(), 0
    for path in ROOT.rglob("*"):
        skip = skipped & set(path.relative_to(ROOT).parts) or path.resolve() == own
        if path.suffix in (".py", ".md", ".toml", ".sh") and path.is_file() and not skip:
            assert not re.search(r"(?<![\w.])/(home|root|work|Users)/", path.read_text()), path
            read += 1
    assert read > 200
