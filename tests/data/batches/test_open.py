"""The data of a config and of a command line: made, opened, and in which mixture."""

import dataclasses
import hashlib
import json
import pathlib

import pytest
import tiny_data

from jaxlm import config
from jaxlm.commands.train import text
from jaxlm.config import Config, ConfigError, PrepareSourceConfig, SourceConfig, config_files, pip_install
from jaxlm.corpus import documents
from jaxlm.corpus.stage import Document
from jaxlm.data.batches import which_data
from jaxlm.data.batches.open import make_data, open_mixture, open_order
from jaxlm.data.shards import shards

MIXTURE = {"prose": 87.0, "math": 10.0, "code": 3.0}  # of `corpus`


def resolve(folder, *overrides: str) -> Config:
    return config.resolve(config_files.load("base", [f"data.dir={folder}", "model.vocab_size=325", *overrides]))


def open_as(c: Config, prepared=(), sources=()):
    """`open_mixture` with these weights in prepare.sources and data.sources."""
    stages = PrepareSourceConfig("x", "auto", "text", (), 0, 0.0, 0, (), ())
    prepare = {name: type(stages)(**{**vars(stages), "weight": weight}) for name, weight in prepared}
    data = {name: SourceConfig("", weight) for name, weight in sources}
    sections = (
        type(c.data)(**{**vars(c.data), "sources": data}),
        type(c.prepare)(**{**vars(c.prepare), "sources": prepare}),
    )
    return open_mixture(*sections, c.model.vocab_size)


def make(c, say):
    make_data(c.data, c.prepare, c.engine, c.model.vocab_size, say)


def test_weights_are_those_of_data_then_of_prepare_then_of_the_manifest(data):
    c = resolve(data.path)
    opened, mixture = open_as(c)
    assert (opened.sha256, mixture) == (data.sha256, data.mixture)
    prepared = [("prose", 2.0), ("no longer there", 1.0)]
    assert open_as(c, prepared)[1] == {"prose": 2.0}
    assert open_as(c, prepared, [("math", 3.0)])[1] == {"math": 3.0}


def test_a_tokenizer_of_another_size_is_refused(data):
    with pytest.raises(ConfigError, match=r"has 325 tokens: set --config\.model\.vocab_size=325"):
        open_as(resolve(data.path, "model.vocab_size=512"))


def test_a_source_that_the_data_lacks_is_refused(data):
    with pytest.raises(ConfigError, match=r"data\.sources names maths, but the data in .* has .*math.*: take this"):
        open_as(resolve(data.path), sources=[("math", 3.0), ("maths", 1.0)])


def test_a_start_checks_the_shards_once(corpus, tmp_path, monkeypatch):
    c = resolve(tmp_path / "d", f"data.path={corpus.folder / 'code.jsonl'}", "data.val_fraction=0.1")
    make(c, lambda line: None)
    checked, check = [], shards._check_files
    monkeypatch.setattr(shards, "_check_files", lambda data: checked.append(data) or check(data))
    text.data(c)
    assert len(checked) == 1


def test_data_that_is_there_is_opened_and_not_made_again(corpus, tmp_path):
    keys = [f"data.path={corpus.folder / 'code.jsonl'}", "data.val_fraction=0.1"]
    c, said = resolve(tmp_path, "data.seed=3", *keys), []
    make(c, said.append)
    assert any(line.startswith("wrote text: ") for line in said)
    sha256, mixture = open_as(c)[0].sha256, open_mixture(c.data, c.prepare, 325)[1]
    assert mixture == {"text": 1.0}
    said.clear()
    make(c, said.append)
    assert open_as(c)[0].sha256 == sha256
    assert not any(line.startswith("wrote") for line in said)
    make(resolve(tmp_path, "data.seed=-1", *keys), said.append)  # as it was made
    with pytest.raises(ConfigError, match="seed"):
        make(resolve(tmp_path, "data.seed=4", *keys), said.append)


def test_shards_with_records_of_another_length_are_read_as_they_are(corpus, tmp_path):
    """`data.block_tokens` of older versions: no token depends on it."""
    c = resolve(tmp_path, f"data.path={corpus.folder / 'code.jsonl'}", "data.val_fraction=0.1")
    make(c, lambda line: None)
    path = tmp_path / "manifest.json"
    manifest = json.loads(path.read_text())
    assert manifest["recipe"]["block_tokens"] == "8192"
    manifest["recipe"]["block_tokens"] = "64"
    path.write_text(json.dumps(manifest))
    make(c, lambda line: None)


def test_the_seed_of_a_run_changes_nothing_of_its_data(corpus, tmp_path):
    """Else three seeds are measured on three texts, by three tokenizers."""
    keys = [f"data.path={corpus.folder / 'code.jsonl'}", "data.val_fraction=0.1"]
    runs = {name: resolve(tmp_path / name, *keys, *more) for name, *more in (("a", "seed=3"), ("b", "seed=4"))}
    runs["c"] = resolve(tmp_path / "c", *keys, "data.seed=4")
    for c in runs.values():
        make(c, lambda line: None)
    one, other, third = (open_as(c)[0].sha256 for c in runs.values())
    assert one == other != third


def test_a_folders_documents_are_weighed_by_what_is_left(tmp_path, make_document):
    entries = {}
    for name, count in (("html", 30), ("text", 9), ("markdown", 1)):
        writer = documents.DocumentWriter(tmp_path / "documents" / name / "00000.parquet")
        for i in range(count):
            writer.add(
                Document(f"{name} page {i} " + " ".join(make_document(name, 100 * i + k) for k in range(3)), f"{i}")
            )
        writer.close()
        path = tmp_path / "documents" / name / "00000.parquet"
        file = {"file": f"documents/{name}/00000.parquet", "size": path.stat().st_size}
        file |= {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "documents": count}
        both = {"documents": count, "bytes": 1}
        entries[name] = {"read": both | {"failed": {}}, "stages": [], "kept": both, "files": [file]}
    (tmp_path / "prepared.json").write_text(json.dumps({"format": 1, "recipe": {}, "sources": entries}))
    documents.write_mixture(tmp_path, {"html": 6.5, "text": 2.25, "markdown": 0.25})
    c, said = resolve(tmp_path, "data.val_fraction=0.1"), []
    make(c, said.append)
    assert open_as(c)[1] == {"html": 6.5, "text": 2.25}
    assert "left out: markdown, of which one document is left; at least two are needed, to hold one out" in said


def test_the_order_of_a_config_with_final_weights(tmp_path, corpus):
    corpus.build(tmp_path / "d")
    keys = ["train.steps=100", "optim.warmup_steps=0", "data.final.share=0.25", "data.final.weights.code=12"]
    order = open_order(resolve(tmp_path / "d", *keys))
    assert (order.mixture, order.final.mixture) == ({**MIXTURE}, {**MIXTURE, "code": 12.0})
    assert (order.switch(), open_order(resolve(tmp_path / "d", *keys[:2])).switch()) == (75, None)
    assert open_order(resolve(tmp_path / "d", *keys, "optim.schedule_steps=40")).switch() == 30
    assert open_order(resolve(tmp_path / "d", *keys, "optim.decay_at_step=20")).switch() == 20
    assert open_order(resolve(tmp_path / "d", *keys), [[3, 6]]).switch() == 71
    c = resolve(tmp_path / "d", *keys)
    # A source that the first mixture leaves out, named or not, has weight 0 there, and is evaluated.
    later = dataclasses.replace(c, data=dataclasses.replace(c.data, sources={"prose": SourceConfig("", 1.0)}))
    assert open_order(later).mixture == {"prose": 1.0, "code": 0.0}
    assert open_order(later).final.mixture == {"prose": 1.0, "code": 12.0}
    for weights, line in (({"cod": 1.0}, "names cod, which is no source: did you mean 'code'"),
                          (dict.fromkeys(MIXTURE, 0.0), "leaves every source at 0")):  # fmt: skip
        final = dataclasses.replace(c.data.final, weights=weights)
        with pytest.raises(ConfigError, match=line):
            open_order(dataclasses.replace(c, data=dataclasses.replace(c.data, final=final)))


@pytest.mark.parametrize("key", ["timeout_s", "max_bytes"])
def test_sizes_have_upper_bounds(key, tmp_path):
    with pytest.raises(ConfigError, match=f"data.{key}=1.* must be at most"):
        resolve(tmp_path, f"data.{key}={10**21}")


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


def resolved(name: str, *overrides: str):
    return config.resolve(config_files.load(name, list(overrides)))


def check(name: str, *overrides: str, say=lambda _: None):
    which_data.check(resolved(name, *overrides), name, overrides, say)


def refused(name: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        check(name, *overrides)
    return str(error.value)


def test_a_folder_that_does_not_exist_beside_one_of_nearly_its_name_is_told(corpus, tmp_path):
    (tmp_path / "docs").mkdir()
    said = []
    make(resolve(tmp_path / "dcos", f"data.path={corpus.folder / 'code.jsonl'}"), said.append)
    assert said[0].endswith(
        f"dcos does not exist: it is made now, of this config's sources; did you mean '{tmp_path}/docs'?"
    )


def test_absent_data_is_refused_with_what_makes_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refused("gpuburnout_1b") == (
        "no data in data/1b: make it with jaxlm prepare data/gpuburnout and jaxlm tokenize data/gpuburnout (its "
        f"sources come from the hub: {pip_install('hub')} first), or train on texts of your own: --config.data.path=FILES"
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


def test_another_share_to_hold_out_of_finished_data_is_refused(tmp_path):
    """It would change nothing. The data's own share may be repeated; without a word on it, the data counts."""
    tiny_data.make(tmp_path, {"a": 1.0})
    own = json.loads((tmp_path / "manifest.json").read_text())["recipe"]["val_fraction"]
    where = ["workdir=w", f"data.dir={tmp_path}"]
    for more in ([], [f"data.val_fraction={own}"]):
        check("base", *where, *more)
    said = refused("base", *where, "data.val_fraction=0.3")
    assert f"holds out {own} of its documents (data.val_fraction): leave the key out" in said
    (tmp_path / "prepared.json").write_text("{}")  # what jaxlm prepare made can be parted anew
    assert f"delete {tmp_path / 'manifest.json'} to part them anew" in refused("base", *where, "data.val_fraction=0.3")
    for damage in ("{", '{"recipe": [1]}', '{"recipe": {"val_fraction": "x"}}'):
        (tmp_path / "manifest.json").write_text(damage)
        check("base", *where, "data.val_fraction=0.3")  # whoever opens the data says what is wrong


def test_the_command_that_trains_on_the_data(tmp_path):
    assert (
        which_data.training("quickstart", ["data.dir=my data"]) == "jaxlm train quickstart '--config.data.dir=my data'"
    )
    assert which_data.training(str(tmp_path), ["seed=1"]) == (
        f"jaxlm train quickstart --config.data.dir={tmp_path} --config.seed=1"
    )
    for word in ("data/techdocs", "configs/data/techdocs.py"):
        assert which_data.training(word, []) == "jaxlm train techdocs_35m"
        assert which_data.training(word, ["data.dir=d", "seed=1"]) == "jaxlm train techdocs_35m --config.data.dir=d"
    assert which_data.training("data/gpuburnout", []) == "jaxlm train gpuburnout_1b"
