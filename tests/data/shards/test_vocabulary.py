"""The size of a vocabulary that the config leaves open."""

import json

import pytest

from jaxlm import config
from jaxlm.config import config_files
from jaxlm.corpus.prepare import FORMAT
from jaxlm.data.shards import vocabulary


def resolve(*overrides: str):
    return config.resolve(config_files.load("base", list(overrides)))


@pytest.mark.parametrize(
    ("n_bytes", "size"),
    [(0, 1024), (300_000, 1024), (2_047_999, 1024), (2_048_000, 2048), (7_200_000, 4096), (10**12, 32_768)],
)
def test_the_size_is_a_power_of_two_by_the_amount_of_text(n_bytes, size):
    assert vocabulary.choose(n_bytes) == size


def test_a_program_without_data_takes_the_datas_size_else_assumes_one(data, tmp_path):
    said = []
    assert vocabulary.assumed(resolve(f"data.dir={data.path}"), said.append).model.vocab_size == 325
    named = resolve(f"data.dir={tmp_path}", f"data.tokenizer={data.path}/tokenizer.model")
    assert vocabulary.assumed(named, said.append).model.vocab_size == 325
    assert vocabulary.assumed(resolve(f"data.dir={tmp_path}"), said.append).model.vocab_size == 32_768
    kept = {"documents": 1, "bytes": 2_100_000}
    source = {"read": kept | {"failed": {}}, "stages": [], "kept": kept, "files": []}
    found = {"format": FORMAT, "recipe": {}, "sources": {"a": source}}
    (tmp_path / "prepared.json").write_text(json.dumps(found))
    assert vocabulary.assumed(resolve(f"data.dir={tmp_path}"), said.append).model.vocab_size == 2048
    assert [line.split(":")[1].split(" ")[1] for line in said] == ["325", "325", "32,768", "2,048"]


def test_a_size_that_is_set_stays(data):
    said = []
    c = resolve(f"data.dir={data.path}", "model.vocab_size=400")
    assert vocabulary.assumed(c, said.append) == vocabulary.with_size(c, 325) == c
    assert not said
