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
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), (page.name, target)


def test_keys_named_in_the_docs_exist():
    base = config_files.load("base")
    keys = set(config_files.flat_keys(base))
    sections = "model|data|train|loss|optim|checkpoint|eval|sample|mesh|log|hardware|distributed|plan|tune|profile"
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for key in re.findall(rf"`(?:--config\.)?((?:{sections})\.[a-z0-9_.]+)", page.read_text()):
            assert key in keys, (page.name, key)


def test_no_path_of_a_developers_machine():
    own = {pathlib.Path(__file__).resolve()}
    for path in ROOT.rglob("*"):
        skip = {".git", ".venv", "jaxlm.egg-info", "__pycache__", "runs", "build"} & set(path.parts)
        if path.suffix in (".py", ".md", ".toml", ".sh") and path.is_file() and not skip and path.resolve() not in own:
            assert not re.search(r"(?<![\w.])/(home|root|work|Users)/", path.read_text()), path
