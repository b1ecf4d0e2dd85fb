"""What a word on the command line names, and a run's config.json back as its config."""

import json
import pathlib

import pytest

from jaxlm import config
from jaxlm.config import ConfigError, config_files
from jaxlm.config.config_files import CONFIG_PACKAGE, find


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def folder(path, **files: str):
    path.mkdir(parents=True)
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text)
    return path


def run(path):
    c = config.resolve(config_files.load("quickstart", [f"workdir={path}", "train.steps=777"]))
    return folder(path, config__json=config.to_json(c))


def test_a_shipped_config_by_name(here):
    for name in ("quickstart", "configs/quickstart.py", "./configs/quickstart.py", "quickstart.py"):
        assert find(name) == config_files.Found("config", CONFIG_PACKAGE / "quickstart.py"), name
    for name in ("data/techdocs", "data/techdocs.py", "configs/data/techdocs.py"):
        assert find(name) == config_files.Found("config", CONFIG_PACKAGE / "data/techdocs.py"), name


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("import nonsense_module", "ModuleNotFoundError: No module named 'nonsense_module'"),
        ("def get_config():\n    return {}", "must return an ml_collections ConfigDict"),
    ],
)
def test_a_file_is_a_config(here, text, line):
    (here / "mine.py").write_text(text)
    assert find("mine.py") == config_files.Found("config", config_files.find_config("mine.py"))
    assert find(str(here / "mine.py")).kind == find("./mine.py").kind == "config"
    with pytest.raises(ConfigError, match=line):
        config_files.load(str(here / "mine.py"))


def test_a_shipped_name_wins_over_a_folder_which_is_written_as_a_path(here):
    run(here / "quickstart")
    assert find("quickstart").kind == "config"
    assert [find(word).kind for word in ("./quickstart", "quickstart/", str(here / "quickstart"))] == ["run"] * 3
    folder(here / "data/techdocs")
    assert find("data/techdocs").kind == "config"
    assert find("./data/techdocs").kind == "documents"


@pytest.mark.parametrize(("text", "why"), [("{broken", ""), ("{}", r" \(it has no section train\)")])
def test_a_folder_with_our_config_is_a_run_also_when_the_file_is_damaged(here, text, why):
    run(here / "runs/a")
    assert find("runs/a").kind == "run"
    (here / "runs/a/model.safetensors").write_text("")
    assert find("runs/a").kind == "run"
    (here / "runs/a/config.json").write_text(text)
    assert text == "{}" or find("runs/a").kind == "run"
    with pytest.raises(ConfigError, match=f"is not the config of a run{why}"):
        config_files.from_run(here / "runs/a/config.json")


@pytest.mark.parametrize(
    "files",
    [
        {"config__json": json.dumps({"architectures": ["LlamaForCausalLM"]})},
        {"config__json": json.dumps({"model_type": "gpt2"})},
        {"model__safetensors": ""},
        {"adapter_model__safetensors": "", "adapter_config__json": "{}"},
    ],
)
def test_a_folder_of_hugging_face_is_a_model(here, files):
    assert find(str(folder(here / "m", **files))).kind == "model"


def test_anything_else_that_is_there_is_documents(here):
    folder(here / "texts", a__txt="hello")
    assert [find(word).kind for word in ("texts", "texts/a.txt", "texts/*.txt")] == ["documents"] * 3


ABSENT = "no config file, shipped config or folder"


@pytest.mark.parametrize(
    ("word", "reads_run", "hint"),
    [
        ("quikstart", False, "did you mean 'quickstart'?"),
        ("data/techdoc", False, "did you mean 'data/techdocs'?"),
        ("1b", False, "did you mean 'gpuburnout_1b' or 'gpuburnout_1b_h128' or 'speed_1b'?"),
        ("other/quickstart", False, ABSENT),
        ("configs/other/quickstart.py", False, ABSENT),
        ("data", False, ABSENT),
        ("./nosuch", False, "a run a folder with config.json"),
        ("./quickstart", False, "did you mean 'quickstart'?"),
        ("nosuch.py", False, "jaxlm help configs lists the shipped ones"),
        ("runs/frist", False, "did you mean 'runs/first'?"),
        ("runs/100%", False, "a run a folder with config.json"),
        ("texts/*.jsonl", False, "a run a folder with config.json"),
        ("runs/frist", True, "no run in runs/frist: did you mean 'runs/first'?"),
        ("runs/quickstrt", True, "no run in runs/quickstrt: there is no such folder"),
        ("quikstart", True, f"{ABSENT} 'quikstart'; did you mean 'quickstart'?"),
        ("data/techdoc", True, f"{ABSENT} 'data/techdoc'; did you mean 'data/techdocs'?"),
    ],
)
def test_what_is_not_there_is_one_line_with_the_nearest(here, word, reads_run, hint):
    run(here / "runs/first")
    with pytest.raises(ConfigError, match="^no run in " if "no run" in hint else ABSENT) as error:
        find(word, reads_run=reads_run)
    assert hint in str(error.value)
    assert "\n" not in str(error.value)


def test_overrides_keep_what_stands_in_them():
    read = config_files.load("quickstart", ["sample.prompts=('100% of %s', 'a=b')", "data.path=50%"])
    assert read.sample.prompts == ("100% of %s", "a=b")
    assert read.data.path == "50%"


def test_an_old_run_has_the_defaults_of_newer_keys(tmp_path):
    c = config.resolve(config_files.load("quickstart", [f"workdir={tmp_path}"]))
    saved = json.loads(config.to_json(c))
    del saved["log"]["wandb"], saved["prepare"]["sources"]["prose"]["exclude"]
    (tmp_path / "config.json").write_text(json.dumps(saved))
    assert config.resolve(config_files.from_run(tmp_path / "config.json")) == c


def test_a_run_that_is_called_like_a_config_is_named_so_that_it_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("sft").mkdir()
    assert config_files.no_run("runs/sft", "sft") == "no run in runs/sft"
    for name in ("metrics.jsonl", "config.json"):
        pathlib.Path("sft", name).write_text("{}")
    assert config_files.find("sft").kind == "config"
    assert config_files.in_words(pathlib.Path("sft")) == "./sft"
    assert config_files.in_words(pathlib.Path("runs/sft")) == "runs/sft"
    assert config_files.no_run("runs/sft", "sft").endswith("(sft is a shipped config; the run of that name is ./sft)")
