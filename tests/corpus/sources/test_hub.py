"""Hub datasets without a network, and the embedded corpus: deterministic, without duplicates, not imported."""

import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxlm.config import ConfigError
from jaxlm.corpus.sources import embedded
from jaxlm.corpus.sources.units import split_source


@pytest.fixture
def hub_dir(tmp_path):
    for name, texts in {
        "org/set/README.md": None,
        "org/set/data/train-00000-of-00002.parquet": ["t0", "t1"],
        "org/set/data/train-00001-of-00002.parquet": ["t2"],
        "org/set/data/test-00000-of-00001.parquet": ["held out"],
        "org/configs/sample/10BT/000_00000.parquet": ["s0"],
        "org/configs/full/x.parquet": ["f0"],
        "org/configs/data/en/train.parquet": ["e0"],
    }.items():
        path = tmp_path / "hub" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if texts is None:
            path.write_text("# A card")
        else:
            pq.write_table(pa.table({"text": texts, "url": ["https://a.org"] * len(texts)}), path)
    (tmp_path / "hub/org/lines").mkdir()
    (tmp_path / "hub/org/lines/a.jsonl").write_text('{"body": "b0"}\n')
    return str(tmp_path / "hub")


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("hub:org/set", ["t0", "t1", "t2"]),
        ("hub:org/set::test", ["held out"]),
        ("hub:org/configs:full", ["f0"]),
        ("hub:org/configs:sample/10BT", ["s0"]),
        ("hub:org/configs:en:train", ["e0"]),
        ("hub:org/configs:sample-10BT", ["s0"]),
    ],
)
def test_a_folder_takes_the_place_of_the_hub(hub_dir, read_source, name, texts):
    documents, _ = read_source(name, hub_dir=hub_dir)
    assert [d.text for d in documents] == texts
    assert documents[0].id.startswith(name.split(":")[1] + "/")
    assert documents[0].metadata["url"] == "https://a.org"


def test_text_key_and_clear_errors(hub_dir, read_source):
    assert [d.id for d in read_source("hub:org/lines", hub_dir=hub_dir, text_key="body")[0]] == ["org/lines/a.jsonl:1"]
    for name, message in [
        ("hub:org/none", "has no folder org/none"),
        ("hub:org/set::validation", "no split 'validation' in .*; there are test, train"),
        ("hub:org/configs:fulll", "no configuration 'fulll' in .*; there are full, sample"),
        ("hub:", "not of the form"),
        ("hub:a:b:c:d", "not of the form"),
    ]:
        with pytest.raises(ConfigError, match=message):
            read_source(name, hub_dir=hub_dir)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A dataset repository as `datasets` reads it, with configurations in its card."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for repo, split, suffix in (("lines", "train", "jsonl"), ("table", "test", "csv")):
        root = tmp_path / repo
        (root / "sub").mkdir(parents=True)
        (root / "README.md").write_text(
            f"---\nconfigs:\n- config_name: small\n  data_files:\n  - split: {split}\n    path: sub/*.{suffix}\n---\n"
        )
    for name, texts in {"a": ["a0", "a1"], "b": ["b0"]}.items():
        (tmp_path / "lines/sub" / f"{name}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    for name in ("c", "d"):
        (tmp_path / "table/sub" / f"{name}.csv").write_text(f"text,title\n{name}0,T\n{name}1,T\n,T\n")
    return tmp_path


def test_the_files_of_a_configuration_are_read_in_pieces(repository, read_source, spec):
    documents, _ = read_source(f"hub:{repository}/lines:small")
    assert [d.text for d in documents] == ["a0", "a1", "b0"]
    assert documents[0].id == f"{repository}/lines/sub/a.jsonl:1"
    assert len(split_source(spec(f"hub:{repository}/lines:small"), 20)) > 2


def test_other_formats_are_streamed_shard_by_shard(repository, read_source, spec):
    name = f"hub:{repository}/table:small:test"
    documents, stats = read_source(name)
    assert [d.text for d in documents] == ["c0", "c1", "d0", "d1"]
    assert documents[2].id == f"{repository}/table/small/test/1-of-2:0"
    assert documents[0].metadata["title"] == "T"
    assert stats.skipped == {"no text in field 'text'": 2}
    assert len(split_source(spec(name), 1 << 20)) == 2
    with pytest.raises(ConfigError, match="no text in field 'body'; its fields are text, title"):
        read_source(name, text_key="body")
    with pytest.raises(ConfigError, match="no split 'train'; there are test"):
        read_source(f"hub:{repository}/table:small")
    with pytest.raises(ConfigError, match="set hub_dir"):
        read_source(f"hub:{repository}/table:absent")


CAP = 300_000


@pytest.mark.parametrize("name", embedded.NAMES)
def test_sources_are_sizeable_distinct_and_the_same_each_time(name):
    documents = list(embedded.iterate_embedded(name, CAP))
    assert documents == list(embedded.iterate_embedded(name, CAP))
    size = sum(len(text.encode()) for _, text in documents)
    assert 0.5 * CAP < size <= CAP
    assert len({doc_id for doc_id, _ in documents}) == len(documents)
    bodies = [" ".join(text.removeprefix(doc_id).split()) for doc_id, text in documents]
    assert len(set(bodies)) == len(bodies)
    assert not any("/tests/" in doc_id or ".tests." in doc_id for doc_id, _ in documents)


def test_each_source_is_what_it_says():
    prose = dict(embedded.iterate_embedded("prose", CAP * 3))
    assert any(doc_id.startswith("python-topic.") for doc_id in prose)
    assert "comparison" in prose["python-topic.comparisons"]
    math = list(embedded.iterate_embedded("math", CAP))
    assert {doc_id.split(".")[0] for doc_id, _ in math} == {"numpy", "scipy", "jax"}
    for doc_id, text in embedded.iterate_embedded("code", CAP):
        compile(text, doc_id, "exec", dont_inherit=True)


def test_nothing_scanned_is_imported():
    code = (
        "import sys; from jaxlm.corpus.sources import embedded\n"
        "before = set(sys.modules)\n"
        "list(embedded.iterate_embedded('math', 200_000)); list(embedded.iterate_embedded('prose', 200_000))\n"
        "new = {m.split('.')[0] for m in set(sys.modules) - before}\n"
        "assert not new & {'scipy', 'flax', 'optax', 'tensorflow_datasets', 'pyarrow', 'turtle', 'this'}, new\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_an_unknown_name_is_refused():
    with pytest.raises(ConfigError, match="no embedded source 'poems'; there are embedded:prose, embedded:math"):
        list(embedded.iterate_embedded("poems"))
