"""What a word on the command line names, and a run's config.json back as its config."""

import json

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


def test_a_file_is_a_config(here):
    (here / "mine.py").write_text("")
    assert find("mine.py") == config_files.Found("config", config_files.find_config("mine.py"))
    assert find(str(here / "mine.py")).kind == find("./mine.py").kind == "config"


@pytest.mark.parametrize("name", ["quickstart", "configs/quickstart.py", "./configs/quickstart.py", "quickstart.py"])
def test_a_shipped_config_by_name(here, name):
    assert find(name) == config_files.Found("config", CONFIG_PACKAGE / "quickstart.py")


def test_a_shipped_name_wins_over_a_folder_which_is_written_as_a_path(here):
    run(here / "quickstart")
    assert find("quickstart").kind == "config"
    assert [find(word).kind for word in ("./quickstart", "quickstart/", str(here / "quickstart"))] == ["run"] * 3
    folder(here / "data/techdocs")
    assert find("data/techdocs").kind == "config"
    assert find("./data/techdocs").kind == "documents"


def test_a_folder_with_our_config_is_a_run_also_when_the_file_is_damaged(here):
    run(here / "runs/a")
    assert find("runs/a").kind == "run"
    (here / "runs/a/model.safetensors").write_text("")
    assert find("runs/a").kind == "run"
    (here / "runs/a/config.json").write_text("{broken")
    assert find("runs/a").kind == "run"
    with pytest.raises(ConfigError, match="is not the config of a run"):
        config_files.from_run(here / "runs/a/config.json")
    (here / "runs/a/config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is not the config of a run \(it has no section train\)"):
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


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("quikstart", "did you mean 'quickstart'?"),
        ("./nosuch", "a run a folder with config.json"),
        ("./quickstart", "did you mean 'quickstart'?"),
        ("nosuch.py", "shipped: domain_7b, "),
        ("runs/frist", "did you mean 'runs/first'?"),
        ("runs/100%", "a run a folder with config.json"),
        ("texts/*.jsonl", "a run a folder with config.json"),
    ],
)
def test_what_is_not_there_is_one_line_with_the_nearest(here, word, hint):
    run(here / "runs/first")
    with pytest.raises(ConfigError, match="no config file, shipped config or folder") as error:
        find(word)
    assert hint in str(error.value)
    assert "\n" not in str(error.value)


def test_a_path_where_nothing_is_names_a_run_where_runs_are_read(here):
    run(here / "runs/first")
    for word, told in (
        ("runs/frist", "no run in runs/frist: did you mean 'runs/first'?"),
        ("runs/quickstrt", "no run in runs/quickstrt: there is no such folder"),
        ("quikstart", "no config file, shipped config or folder 'quikstart'; did you mean 'quickstart'?"),
        ("data/techdoc", "no config file, shipped config or folder 'data/techdoc'; did you mean 'data/techdocs'?"),
    ):
        with pytest.raises(ConfigError) as error:
            find(word, reads_run=True)
        assert str(error.value) == told


def test_overrides_keep_what_stands_in_them():
    read = config_files.load("quickstart", ["sample.prompts=('100% of %s', 'a=b')", "data.path=50%"])
    assert read.sample.prompts == ("100% of %s", "a=b")
    assert read.data.path == "50%"


def test_an_old_run_has_the_defaults_of_newer_keys(tmp_path):
    c = config.resolve(config_files.load("quickstart", [f"workdir={tmp_path}"]))
    saved = json.loads(config.to_json(c))
    del saved["log"]["wandb"], saved["prepare"]["sources"]["prose"]["exclude"]
    (tmp_path / "config.json").write_text(json.dumps(saved))
    read = config.resolve(config_files.from_run(tmp_path / "config.json"))
    assert (read.log.wandb, read.prepare.sources["prose"].exclude) == ("", ())
    assert read.prepare.sources["prose"].weight == 87
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(ConfigError, match="is not the config of a run"):
        config_files.from_run(tmp_path / "config.json")
