"""Texts made so that each number is known: what fits, what falls back, what is lost, which size a vocabulary has."""

import dataclasses
import io
import json

import numpy as np
import pytest
import sentencepiece as spm

from jaxlm import config
from jaxlm.config import ConfigError, config_files
from jaxlm.corpus.prepare import FORMAT
from jaxlm.data.shards import tokenizer_fit, vocabulary
from jaxlm.data.tokenizer import ours, train


@pytest.fixture(scope="module")
def texts(make_document):
    return [make_document("a", i) + f"\n    indented {i}\n" for i in range(400)]


@pytest.fixture(scope="module")
def coder(texts):
    return train.train_tokenizer(texts, vocab_size=600, chat_tokens=True)


@pytest.fixture(scope="module")
def lossy():
    """A model that makes upper case lower and has no bytes to fall back to."""
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat on the mat with a hat"] * 50),
        model_writer=model,
        vocab_size=40,
        hard_vocab_limit=False,
        normalization_rule_name="nmt_nfkc_cf",
        model_type="bpe",
        minloglevel=2,
    )
    return ours.Tokenizer(model.getvalue())


def test_numbers_of_known_texts(coder, texts):
    rows = tokenizer_fit.fit(
        coder, {"own": texts, "foreign": ["Ωμέγα 日本語 ж"] * 3, "spaces": [" \n\n\t \n"], "none": []}
    )
    own, foreign, spaces, none = rows
    assert [row["source"] for row in rows] == ["own", "foreign", "spaces", "none"]
    n_tokens = sum(map(len, coder.encode_batch(texts)))
    assert own["bytes_per_token"] == pytest.approx(sum(len(t.encode()) for t in texts) / n_tokens)
    assert own["tokens_per_word"] == pytest.approx(n_tokens / sum(len(t.split()) for t in texts))
    assert own["byte_fallback"] == 0  # newlines are bytes too, and do not count
    learned = set(range(3, 595)) - set(coder.byte_ids().tolist())
    used = {i for ids in coder.encode_batch(texts) for i in ids.tolist()}
    assert own["unused_pieces"] == pytest.approx(len(learned - used) / len(learned))
    # 5 Greek letters of 2 bytes, 3 characters of 3, 1 of 2; words: 1, 3 and 1.
    assert foreign["byte_fallback"] == pytest.approx(21 / 23)
    assert foreign["tokens_per_word"] == pytest.approx(23 / 5)
    assert foreign["unused_pieces"] > 0.9
    assert spaces["white_space"] == 1
    assert all(row["lossy_documents"] == 0 for row in rows)
    assert none["bytes_per_token"] == 0
    assert json.loads(json.dumps(rows)) == rows


def test_single_letters_tell_of_broken_text(coder, texts):
    broken = [" ".join("".join(text.split())) for text in texts[:50]]
    whole, apart = tokenizer_fit.fit(coder, {"whole": texts, "apart": broken})
    assert apart["single_letters"] > 0.8
    assert whole["single_letters"] < 0.4


def test_a_reference_is_compared_on_the_same_texts(coder, texts):
    small = train.train_tokenizer(texts, vocab_size=320, chat_tokens=False)
    (row,) = tokenizer_fit.fit(coder, {"a": texts}, reference=small)
    assert row["reference_bytes_per_token"] < row["bytes_per_token"]
    assert row["tokens_saved"] == pytest.approx(1 - row["reference_bytes_per_token"] / row["bytes_per_token"])
    assert tokenizer_fit.fit(coder, {"a": texts}, reference=coder)[0]["tokens_saved"] == 0


def test_traits(coder, lossy):
    found = tokenizer_fit.traits(coder)
    assert found == {
        "vocab_size": 600, "byte_pieces": 256, "tokens_of_2024": 4, "indent_4": 0, "indent_8": found["indent_8"],
        "tab": 1, "newline": 1, "blank_line": 2,
    }  # fmt: skip
    assert 1 <= found["indent_8"] <= 2
    assert tokenizer_fit.traits(lossy)["byte_pieces"] == 0
    assert tokenizer_fit.traits(lossy)["indent_8"] == 0  # it drops them


def test_held_out_texts_are_those_of_the_shards(data, corpus):
    raw = {json.loads(line)["text"] for line in open(corpus.folder / "prose.jsonl")}
    texts, lost = tokenizer_fit.held_out(data, "prose")
    assert lost == 0
    assert set(texts) <= raw
    assert len(texts) == data.entry("prose", "val")["documents"]
    few, _ = tokenizer_fit.held_out(data, "prose", max_bytes=200)
    assert few == texts[: len(few)]
    assert sum(len(t) for t in few[:-1]) < 200
    train, _ = tokenizer_fit.held_out(data, "prose", split="train")
    assert sorted(train + texts) == sorted(raw)


def test_the_report_of_a_data_directory(data):
    found = tokenizer_fit.report(data)
    assert [row["source"] for row in found["sources"]] == list(data.sources)
    assert json.loads(json.dumps(found)) == found
    tokens = np.concatenate([data.stream(s).read(0, data.stream(s).tokens) for s in data.sources])
    coder = data.tokenizer()
    learned = set(range(coder.vocab_size)) - set(coder.byte_ids().tolist()) - {0, 1, 2, *range(320, 325)}
    assert found["pieces"] == len(learned)
    assert found["unused_pieces"] == len(learned - set(tokens.tolist()))
    assert all(row["unused_pieces"] >= found["unused_pieces"] / found["pieces"] for row in found["sources"])


def test_what_was_lost_in_building_is_reported(corpus, lossy, tmp_path):
    (tmp_path / "lossy.model").write_bytes(lossy.model_bytes)
    settings = dataclasses.replace(corpus.settings, chat_tokens=False)
    changed = dataclasses.replace(corpus, settings=settings)
    data = changed.build(tmp_path / "d", tokenizer_path=str(tmp_path / "lossy.model"), vocab_size=lossy.vocab_size)
    rows = tokenizer_fit.report(data)["sources"]
    assert [row["source"] for row in rows] == list(data.sources)
    assert all(row["lossy_documents"] > 0 for row in rows)


def test_a_sweep(texts):
    rows = tokenizer_fit.sweep(texts, [320, 450, 600], d_model=64, tied=False, corpus_bytes=10**6)
    assert [row["vocab_size"] for row in rows] == [320, 450, 600]
    assert rows[0]["bytes_per_token"] < rows[1]["bytes_per_token"] < rows[2]["bytes_per_token"]
    assert [row["parameters"] for row in rows] == [2 * 384 * 64, 2 * 512 * 64, 2 * 640 * 64]
    assert rows[0]["tokens"] == round(10**6 / rows[0]["bytes_per_token"])
    (tied,) = tokenizer_fit.sweep(texts, [384], d_model=64, tied=True, model_type="unigram")
    assert tied["parameters"] == 384 * 64
    assert tied["tokens_per_gb"] == round(10**9 / tied["bytes_per_token"])


def test_a_sweep_measures_what_it_did_not_train_on(texts, monkeypatch):
    seen, original = [], tokenizer_fit.train_tokenizer
    monkeypatch.setattr(tokenizer_fit, "train_tokenizer", lambda t, **kw: original(seen.extend(t) or list(seen), **kw))
    measured = []
    monkeypatch.setattr(
        ours.Tokenizer, "encode_batch", lambda self, t: measured.extend(t) or [np.zeros(1, np.int32)] * len(t)
    )
    for some in (texts, texts[:5]):
        seen.clear()
        measured.clear()
        tokenizer_fit.sweep(some, [300], d_model=1, tied=True)
        assert sorted(seen + measured) == sorted(some)
        assert measured


def test_bad_sweeps_are_refused(texts):
    with pytest.raises(ConfigError, match="needs two documents"):
        tokenizer_fit.sweep(texts[:1], [320], d_model=1, tied=True)
    with pytest.raises(ConfigError, match="too small for a vocabulary of 50000; the largest it supports"):
        tokenizer_fit.sweep(texts, [320, 50000], d_model=1, tied=True)


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
