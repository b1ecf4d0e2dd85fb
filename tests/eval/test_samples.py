"""Samples: from prompt texts to texts, repeatable, written by step; and what tells of a text that falls apart."""

import dataclasses
import json

import numpy as np
import pytest
import tiny_data
import tiny_models as tiny

from jaxlm import config, models
from jaxlm.config import config_files
from jaxlm.data.tokenizer.stop_strings import Text
from jaxlm.devices import processes
from jaxlm.eval import samples
from jaxlm.models.decode import schedule


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    data = tiny_data.make(tmp_path_factory.mktemp("data"), {"a": 1.0})
    c = config.resolve(config_files.load("base", ["data.path=x", "sample.prompts=('one two','sun')"]))
    model_config = dataclasses.replace(tiny.model_config(n_layers=1), vocab_size=300)
    c = dataclasses.replace(c, model=model_config, sample=dataclasses.replace(c.sample, max_new_tokens=12))
    model = models.build(c.model, "xla")
    return c, model, tiny.random_params(model), data


def test_samples_are_written_shown_and_repeatable(parts, tmp_path):
    c, model, params, data = parts
    sample = samples.make(c.sample, c.seed, model, data, tmp_path)
    lines = sample({"params": params}, 7)[0]
    records = [json.loads(line) for line in (tmp_path / "samples/7.jsonl").read_text().splitlines()]
    assert [r["prompt"] for r in records] == ["one two", "sun"]
    assert all(r["step"] == 7 and r["text"] for r in records)
    assert lines == ["step 7  drawn: " + " ".join(f"[{r['prompt']}]{r['text']}".split()) for r in records]
    assert sample({"params": params}, 8)[0] == [line.replace("step 7", "step 8") for line in lines]
    assert samples.make(c.sample, 5, model, data, tmp_path)({"params": params}, 7)[0] != lines


def test_each_prompt_is_continued_greedily_too_and_each_line_names_its_temperature(parts, tmp_path):
    c, model, params, data = parts
    both = dataclasses.replace(c.sample, temperature=0.7, also_greedy=True)
    shown = samples.make(both, c.seed, model, data, tmp_path)({"params": params}, 7)[0]
    records = [json.loads(line) for line in (tmp_path / "samples/7.jsonl").read_text().splitlines()]
    assert [(r["prompt"], r["temperature"]) for r in records] == [
        ("one two", 0.0),
        ("sun", 0.0),
        ("one two", 0.7),
        ("sun", 0.7),
    ]
    assert [line.partition("]")[0] for line in shown] == [
        f"step 7  {way}: [{prompt}" for way in ("greedy", "drawn") for prompt in ("one two", "sun")
    ]
    for temperature, part in ((0.0, records[:2]), (0.7, records[2:])):
        way = dataclasses.replace(c.sample, temperature=temperature)
        alone = samples.continue_prompts(model, {"params": params}, data.tokenizer(), way.prompts, way, c.seed)
        assert [r["text"] for r in part] == alone
    once = dataclasses.replace(both, temperature=0.0)  # greedy twice would say the same twice
    assert len(samples.make(once, c.seed, model, data, tmp_path)({"params": params}, 8)[0]) == 2


def test_the_terminal_shows_two_prompts_in_short_and_the_file_holds_all(tmp_path):
    texts = ["\n\na\n\n  b ", "long " * 100, "not shown"]
    written = [{"prompt": f"p{i}", "temperature": 0.6, "text": text, "ended": True} for i, text in enumerate(texts)]
    first, second = samples._write(tmp_path / "samples", 7, written)
    assert first == "step 7  drawn: [p0] a b"
    assert second == f"step 7  drawn: {('[p1]' + 'long ' * 60)[:140]} ..."
    assert len((tmp_path / "samples/7.jsonl").read_text().splitlines()) == 3


def test_samples_that_can_not_be_written_fail_on_all_processes(parts, tmp_path, monkeypatch):
    """The second of two processes is acted out: the first one says that its disk is full."""
    c, model, params, data = parts
    sample = samples.make(c.sample, c.seed, model, data, tmp_path)
    full = np.frombuffer(b"1:No space left on device".ljust(2000), np.uint8)
    monkeypatch.setattr(processes.jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes.jax, "process_index", lambda: 1)
    monkeypatch.setattr(processes.multihost_utils, "process_allgather", lambda mine: [full, mine])
    with pytest.raises(config.RunError, match="process 0: No space left on device"):
        sample({"params": params}, 7)
    monkeypatch.setattr(processes.multihost_utils, "process_allgather", lambda mine: [mine, mine])
    assert sample({"params": params}, 7)[0] == []
    assert not list(tmp_path.iterdir())


def test_a_prompt_longer_than_the_context_is_refused_at_once(parts, tmp_path):
    c, model, _, data = parts
    long = dataclasses.replace(c.sample, prompts=("one", "one two " * 50))
    with pytest.raises(config.ConfigError, match=r"prompt 1 has \d+ tokens and leaves no room in model.max_seq_len=64"):
        samples.make(long, c.seed, model, data, tmp_path)


def test_a_stream_gives_the_same_texts_in_whole_characters(parts):
    c, model, params, data = parts
    prompts = ["one", "two", "one"]
    given = (
        model, {"params": params}, data.tokenizer(), prompts,
        dataclasses.replace(c.sample, temperature=2.0, top_k=0, top_p=1.0), 1,
    )  # fmt: skip
    expected = samples.continue_prompts(*given)
    stream, texts, order = samples.Stream(*given), [""] * len(prompts), []
    for row, piece in stream:
        assert piece
        texts[row] += piece
        order.append(row)
    assert texts == expected
    assert any("\ufffd" in text for text in texts)  # bytes that are no character are shown in the end
    assert order == sorted(order)
    assert order.count(0) > 3
    assert 0 < stream.tokens <= 33
    assert stream.seconds > 0


def test_a_character_is_shown_when_all_its_bytes_are_there(parts):
    """The mark of a missing character too, where the model says it."""
    c, model, params, data = parts
    for said in ("\u20ac", "\ufffd"):  # three bytes, none of which the tokenizer knows as a piece
        stream = samples.Stream(model, {"params": params}, data.tokenizer(), ["one"], c.sample, 0)
        ids = data.tokenizer().encode(f"{said}!")
        assert len(ids) >= 4
        stream._rows[0] = samples._Row(Text(data.tokenizer()))
        said_ids = [schedule.Update((schedule.Token(i),)) for i in ids]
        stream._updates = iter([(0, update) for update in (*said_ids, schedule.Update((), ended="length"))])
        assert list(stream) == [(0, said), (0, "!")]


PROSE = (
    "The harbour lay quiet under a sky of slate, and the last of the fishing boats had come in before the rain. "
    "A boy sat on the wall with a line in the water, though nobody had caught anything there since the spring."
)


def test_prose_is_sound():
    found = samples.degeneration(PROSE)
    assert found["repetition"] == 0
    assert found["distinct_2"] > 0.9
    assert found["degenerates_at"] is None
    assert found["junk"] == 0


def test_figures_by_hand():
    found = samples.degeneration("a b c d a b c d")  # 5 4-grams, 4 of them different; 7 2-grams, 4 different
    assert found["repetition"] == pytest.approx(1 / 5)
    assert found["distinct_2"] == pytest.approx(4 / 7, abs=1e-4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{PROSE} and so and so and so and so and so and so and", len(PROSE.split())),
        ("go " * 40, 0),
        ("It is said that the the the the the the the the the", 4),
        ("no no no", None),  # speech
        ("one two three one two three one two three four", None),  # it went on
        ("", None),
        ("x", None),
    ],
)
def test_from_where_it_loops(text, words):
    assert samples.degeneration(text)["degenerates_at"] == words


def test_junk():
    assert samples.junk("Hello <|im_start|>") == pytest.approx(12 / 18)
    assert samples.junk("\ufffd\ufffdab") == 0.5
    assert samples.junk("PersonX goes to the store") == pytest.approx(7 / 25)
    assert samples.junk("The `<|im_start|>` token opens a turn.") == 0  # talked about, not leaked
    assert samples.junk("") == 0
