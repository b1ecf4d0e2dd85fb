"""A mangled manifest is one line that says what is wrong, when the data is opened."""

import json
import operator
import shutil

import pytest

from jaxlm.config import ConfigError
from jaxlm.data.shards import manifest, shards


def change(data, tmp_path, path, value):
    """A manifest of `data` in which the item at `path` is `value`; without the item if `value` is `del`."""
    found = json.loads((data.path / manifest.MANIFEST).read_text())
    *above, last = [int(key) if key.isdigit() else key for key in path.split("/")]
    inner = found
    for key in above:
        inner = inner[key]
    if value == "del":
        operator.delitem(inner, last)
    else:
        inner[last] = value
    (tmp_path / manifest.MANIFEST).write_text(json.dumps(found))
    return tmp_path


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("dtype", "del", "dtype is missing"),
        ("block_tokens", "del", "block_tokens is missing"),
        ("block_tokens", 0, "block_tokens is 0 instead of a whole number of at least 1"),
        ("block_tokens", 65, r"sources.prose.train has [\d,]+ tokens, but its shards have [\d,]+ in \d+ records of 65"),
        ("recipe", "del", "recipe is missing"),
        ("recipe", [], r"recipe is \[\] instead of an object"),
        ("sources/prose/train/tokens", "del", "sources.prose.train.tokens is missing"),
        ("sources/prose/train/tokens", True, "sources.prose.train.tokens is true instead of a whole number"),
        ("sources/prose/train", None, "sources.prose.train is null instead of an object"),
        ("sources", [], r"sources is \[\] instead of an object"),
        ("sources", {}, "sources is empty"),
        ("sources/prose/val/shards/0/size", "y",
         r'sources.prose.val.shards\[0\].size is "y" instead of a whole number'),
        ("sources/prose/val/shards/0/file", None, r"shards\[0\].file is null instead of a path in the data directory"),
        ("sources/prose/val/shards/0/file", "../x", r"file is \"../x\" instead of a path in the data directory"),
        ("sources/prose/val/shards/0/sha256", "AB", "instead of a sha256 in hex"),
        ("sources/prose/train/index", "del", "sources.prose.train.index is missing"),
        ("mixture", {"poems": 1}, "mixture names 'poems', which is no source"),
        ("mixture/prose", -1, "mixture.prose is -1 instead of a number of at least 0"),
        ("tokenizer", "del", "tokenizer is missing"),
        ("tokenizer/eos_id", 325, "tokenizer.eos_id is 325, but tokenizer.vocab_size 325"),
        ("tokenizer/separator_id", 325, "tokenizer.separator_id is 325, but tokenizer.vocab_size 325"),
        ("tokenizer/separator_id", "2", 'tokenizer.separator_id is "2", but tokenizer.vocab_size 325'),
        ("tokenizer/chat_tokens", "no", 'tokenizer.chat_tokens is "no" instead of true or false'),
        ("files", "del", "files is missing"),
    ],
)  # fmt: skip
def test_each_mangled_value_is_named(data, tmp_path, path, value, message):
    with pytest.raises(ConfigError, match=rf"manifest.json is damaged: .*{message}.*; copy it again or rebuild"):
        shards.open_data(change(data, tmp_path, path, value))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no manifest.json"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"format": 99}', "format 99"),
        ('{"format": 1}', "is damaged: recipe is missing"),
        ("[]", "format None"),
    ],
)
def test_what_is_no_data_directory_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / manifest.MANIFEST).write_text(content)
    with pytest.raises(ConfigError, match=message):
        shards.open_data(tmp_path)


def test_a_manifest_without_the_tokenizer_is_refused(data, tmp_path):
    copy = shutil.copytree(data.path, tmp_path / "copy")
    change(data, copy, "files", [])
    with pytest.raises(ConfigError, match=r"manifest.json does not list tokenizer.model"):
        shards.open_data(copy)
