"""The data that a command line means."""

import json
import pathlib

import pytest

from jaxlm import config
from jaxlm.config import ConfigError, config_files
from jaxlm.data.batches import which_data

OWN = "from jaxlm.configs import base\n\n\ndef get_config():\n    c = base.get_config()\n"


def taken(name: str, folder, *overrides: str):
    """The config after `take`, and what it said."""
    words = [f"data.dir={folder}", *overrides]
    file = config_files.find_config(name)
    c = config_files.load(name, words)
    return c, which_data.take(c, file, words)


def folder_of(path: pathlib.Path, file: str, **sources: str) -> pathlib.Path:
    path.mkdir()
    key = "spec" if file == "manifest.json" else "path"
    (path / file).write_text(json.dumps({"sources": {name: {key: where} for name, where in sources.items()}}))
    return path


@pytest.mark.parametrize("file", ["manifest.json", "prepared.json"])
@pytest.mark.parametrize("name", ["quickstart", "local_35m", "gpuburnout_1b"])
def test_a_shipped_config_takes_data_that_it_did_not_make(tmp_path, file, name):
    mine = folder_of(tmp_path / "mine", file, manuals="docs/*.html")
    c, said = taken(name, mine)
    assert (dict(c.data.sources), dict(c.prepare.sources), c.model.vocab_size) == ({}, {}, 0)
    assert said.startswith(f"data: {mine} as it is, with its own sources (manuals), in place of the config's ")
    c, _ = taken(name, mine, "model.vocab_size=600")
    assert c.model.vocab_size == 600


def test_samples_of_other_data_do_not_begin_as_the_configs_own_text(tmp_path):
    mine = folder_of(tmp_path / "mine", "prepared.json", manuals="docs/*.html")
    assert taken("quickstart", mine)[0].sample.prompts == ("The", "In order to")
    assert taken("quickstart", mine, "sample.prompts=('A',)")[0].sample.prompts == ("A",)
    own = folder_of(tmp_path / "own", "prepared.json", prose="embedded:prose")
    assert taken("quickstart", own)[0].sample.prompts == ("Return a new list of", "This function")
    assert taken("reward", mine)[0].sample.prompts == ()


def test_data_that_the_config_made_keeps_its_recipe(tmp_path):
    for name, file in (("quickstart", "prepared.json"), ("local_35m", "manifest.json")):
        c, said = taken(name, folder_of(tmp_path / name, file, prose="embedded:prose", gone="x"))
        assert (said, "prose" in {**c.data.sources, **c.prepare.sources}, c.model.vocab_size > 0) == ("", True, True)
    weights, said = taken("gpuburnout_1b", folder_of(tmp_path / "w", "manifest.json", finemath="documents/finemath"))
    assert (said, weights.data.sources.finemath.weight) == ("", 10.0)
    other = folder_of(
        tmp_path / "o", "prepared.json", prose="my/prose"
    )  # the name alone does not make it the quickstart's
    assert taken("quickstart", other)[1]


def test_a_file_of_ones_own_is_told_that_its_recipe_changed(tmp_path):
    (tmp_path / "my.py").write_text(f"{OWN}    c.data.path = 'new'\n    c.model.vocab_size = 600\n    return c\n")
    c, said = taken(str(tmp_path / "my.py"), folder_of(tmp_path / "data", "manifest.json", text="old"))
    assert (c.data.path, said) == ("new", "")  # `build_data` refuses it
    c, said = taken(str(tmp_path / "my.py"), folder_of(tmp_path / "other", "manifest.json", manuals="old"))
    assert (c.data.path, c.model.vocab_size, bool(said)) == ("", 600, True)


def test_final_weights_of_the_configs_own_sources_go_with_them(tmp_path):
    (tmp_path / "my.py").write_text(
        f"{OWN}    c.data.path = 'new'\n    c.data.final.share = 0.3\n    c.data.final.weights.text = 2.0\n    return c\n"
    )
    mine = folder_of(tmp_path / "mine", "manifest.json", manuals="old", best="old")
    final = taken(str(tmp_path / "my.py"), mine)[0].data.final
    assert (final.share, dict(final.weights)) == (0.0, {})
    final = taken(str(tmp_path / "my.py"), mine, "data.final.weights.best=3")[0].data.final
    assert (final.share, dict(final.weights)) == (0.3, {"best": 3.0})


def test_what_is_not_the_users_choice_stays(tmp_path):
    mine = folder_of(tmp_path / "mine", "manifest.json", manuals="x")
    assert taken("quickstart", mine, "data.path=texts")[1] == ""
    assert taken("quickstart", tmp_path / "absent")[1] == ""
    c = config_files.load("quickstart")
    assert which_data.take(c, config_files.find_config("quickstart"), []) == ""
    (mine / "manifest.json").write_text("{")
    assert taken("quickstart", mine)[1] == ""


def resolve(name: str, *overrides: str):
    return config.resolve(config_files.load(name, list(overrides)))


def check(name: str, *overrides: str, say=lambda _: None):
    which_data.check(resolve(name, *overrides), name, overrides, say)


def refused(name: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        check(name, *overrides)
    return str(error.value)


def test_absent_data_is_refused_with_what_makes_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refused("gpuburnout_1b") == (
        "no data in data/1b: make it with jaxlm prepare data/gpuburnout and jaxlm tokenize data/gpuburnout (its "
        "sources come from the hub: pip install 'jaxlm[hub]' first), or train on texts of your own: --config.data.path=FILES"
    )
    assert refused("techdocs_35m") == (
        "no data in data/techdocs: make it with jaxlm prepare data/techdocs and jaxlm tokenize data/techdocs, or train on "
        "texts of your own: --config.data.path=FILES"
    )
    assert "make it with jaxlm prepare FOLDER --out=mine, or" in refused("base", "data.dir=mine")
    check("quickstart", "workdir=w")
    check("base", f"data.dir={folder_of(tmp_path / 'd', 'prepared.json')}")
    assert not (tmp_path / "data").exists()


def test_raw_files_are_prepared_first(tmp_path):
    for name in ("a/1.html", "a/2.htm.gz", "a/b/3.pdf", "a/4.png", "a/5.rst", "t/1.txt", "t/2.txt", "t/README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    raw, texts = tmp_path / "a", tmp_path / "t"
    assert refused("base", "workdir=w", f"data.path={raw}") == (
        f"{raw} holds 1 .htm, 1 .html, 1 .pdf, 1 .rst: prepare it first: jaxlm prepare {raw} --out=DATA"
    )
    assert f"first jaxlm prepare {raw} --out=DATA, then --config.data.dir=DATA" in refused("base", f"data.dir={raw}")
    assert f"first jaxlm prepare {texts} --out" in refused("quickstart", f"data.dir={texts}")
    said = []
    check("base", "workdir=w", f"data.path={texts}", say=said.append)
    assert said == [f"{texts}: not read: 1 .md; jaxlm prepare {texts} --out=DATA reads them too"]
    (texts / "README.md").unlink()
    assert f"no data that jaxlm made: --config.data.path={texts}" in refused("quickstart", f"data.dir={texts}")


def test_data_is_made_in_a_folder_that_holds_texts_if_they_are_named(tmp_path):
    data, texts = tmp_path / "d", tmp_path / "d" / "raw"
    texts.mkdir(parents=True)
    (texts / "1.jsonl").write_text('{"text": "x"}\n')
    (data / "pages.html").write_text("x")
    for name in ("base", "quickstart"):
        check(name, "workdir=w", f"data.dir={data}", f"data.path={texts}/*.jsonl")
        assert f"first jaxlm prepare {data} --out=DATA" in refused(name, "workdir=w", f"data.dir={data}")
    for key in ("data.path = 'texts'", f"prepare.sources.a = base.source({str(texts)!r}, ('exact',))"):
        (tmp_path / "my.py").write_text(f"{OWN}    c.{key}\n    return c\n")
        check(str(tmp_path / "my.py"), "workdir=w", f"data.dir={data}")
    (data / "pages.html").unlink()
    (texts / "1.jsonl").rename(data / "README.txt")
    check("quickstart", "workdir=w", f"data.dir={data}")
    (data / "README.txt").rename(data / "novel.txt")
    assert f"--config.data.path={data}" in refused("quickstart", "workdir=w", f"data.dir={data}")


def test_the_command_that_trains_on_the_data(tmp_path):
    assert (
        which_data.training("quickstart", ["data.dir=my data"]) == "jaxlm train quickstart '--config.data.dir=my data'"
    )
    for word in ("data/techdocs", "configs/data/techdocs.py"):
        assert which_data.training(word, []) == "jaxlm train techdocs_35m"
        assert which_data.training(word, ["data.dir=d", "seed=1"]) == "jaxlm train techdocs_35m --config.data.dir=d"
    assert which_data.training("data/gpuburnout", []) == "jaxlm train gpuburnout_1b"
