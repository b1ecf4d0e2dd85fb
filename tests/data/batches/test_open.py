"""The data of a config: made, opened, and in which mixture."""

import dataclasses
import hashlib
import json

import pytest

from jaxlm import config
from jaxlm.config import Config, ConfigError, PrepareSourceConfig, SourceConfig, config_files
from jaxlm.corpus import documents
from jaxlm.corpus.stage import Document
from jaxlm.data.batches.open import make_data, open_mixture, open_order

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
