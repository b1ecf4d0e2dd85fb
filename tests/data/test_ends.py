"""What ends an answer: one value, that an import or a start of SFT settles. And what day it is in a template."""

import contextlib
import datetime
import json
import os
import time

import pytest
import tiny_hf

from jaxlm.config import ConfigError
from jaxlm.data.chats import chat
from jaxlm.data.tokenizer import coder, imported
from jaxlm.data.tokenizer.train import train_tokenizer
from jaxlm.eval import results
from jaxlm.host import files
from jaxlm.interop import hf_folder
from jaxlm.run import ledger

pytest.importorskip("tokenizers")
ASKED = "{% if add_generation_prompt %}{{ 'A:' }}{% endif %}"
EACH = "{% for m in messages %}{{ m['role'][0] | upper + ':' + m['content'] }}"
WITH_EOS = EACH + "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}" + ASKED
WITH_NOTHING = EACH + "{{ '\n' }}{% endfor %}" + ASKED
QWEN = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]


def theirs(folder, template, controls=tiny_hf.CHATML, **generation):
    tiny_hf.byte_level(
        folder, controls=controls, eos_token=controls[0], **({"chat_template": template} if template else {})
    )
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return coder.load(folder)


@pytest.fixture(scope="module")
def ours():
    return train_tokenizer(["the cat sat on a mat; user, assistant: hello"] * 50, vocab_size=310, chat_tokens=True)


@pytest.mark.parametrize(
    ("kind", "end", "others"),
    [
        ("ours", "<|im_end|>", {"</s>"}),
        ("llama3", "<|eot_id|>", {"<|end_of_text|>", "<|eom_id|>"}),
        ("qwen", "<|im_end|>", {"<|endoftext|>"}),
        ("eos", "<|endoftext|>", {"<|im_end|>"}),
        ("nothing", None, {"<|endoftext|>", "<|im_end|>"}),
    ],
)
def test_what_ends_an_answer_is_told_and_written(kind, end, others, ours, tmp_path):
    tokenizer = {
        "ours": lambda: ours,
        "llama3": lambda: theirs(tmp_path, tiny_hf.LLAMA3_TEMPLATE, tiny_hf.LLAMA3, eos_token_id=[0, 4, 3]),
        "qwen": lambda: theirs(tmp_path, QWEN), "eos": lambda: theirs(tmp_path, WITH_EOS),
        "nothing": lambda: theirs(tmp_path, WITH_NOTHING),
    }[kind]()  # fmt: skip
    names = {i: piece for piece, i in tokenizer.controls.items()}
    ends = [names[i] for i in chat.ends(tokenizer)]
    assert {*ends} == others | {end} - {None}
    assert chat.answer_end(tokenizer) == (tokenizer.controls[end] if end else None)
    if end:
        assert ends[0] == end
        assert chat.told_ends(tokenizer).startswith(f"an answer ends with {end} or ")
    else:
        assert chat.told_ends(tokenizer).startswith("the chat template writes no token after an answer, so training")
    assert hf_folder.generation(tokenizer)["eos_token_id"] == [*chat.ends(tokenizer)]
    assert chat.ends(chat.settled(tokenizer)) == chat.ends(tokenizer)
    assert chat.settled(tokenizer).sha256 == tokenizer.sha256  # which decides ids alone


def test_what_begins_the_next_document_ends_a_text_too(tmp_path):
    """BOS, which a model that was trained on packed documents says behind each."""
    tiny_hf.byte_fallback(tmp_path)
    assert chat.ends(coder.load(tmp_path)) == (2, 1)
    assert chat.ends(chat.settled(coder.load(tmp_path))) == (2, 1)


def test_an_end_that_is_no_control_token_is_found(tmp_path):
    theirs(tmp_path, QWEN)
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    for added in spec["added_tokens"]:
        added["special"] &= added["content"] != "<|im_end|>"
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    assert chat.answer_end(coder.load(tmp_path)) == 2
    assert chat.told_ends(coder.load(tmp_path)).startswith("an answer ends with <|im_end|> or ")


def test_settled_ends_stay_whatever_becomes_of_the_files(tmp_path):
    tokenizer = theirs(tmp_path / "model", tiny_hf.LLAMA3_TEMPLATE, tiny_hf.LLAMA3, eos_token_id=[0, 4])
    coder.write(chat.settled(tokenizer), tmp_path / "run")
    for path in (tmp_path / "run").glob("*"):
        if path.name not in (imported.JSON, imported.IDS):
            path.unlink()
    assert {*chat.ends(coder.load(tmp_path / "run"))} == {0, 3, 4}


def test_what_was_imported_before_keeps_its_ends_and_its_hash(tmp_path):
    """Its ids file names none: then EOS, what begins a document and <|im_end|> end an answer, as they did."""
    now = theirs(tmp_path, tiny_hf.LLAMA3_TEMPLATE, tiny_hf.LLAMA3, eos_token_id=[0, 4, 3])
    before = {**now.files, imported.IDS: b'{"eos_id": 0, "bos_id": null, "opening": []}\n'}
    kept = coder.read(before, tmp_path)
    assert chat.ends(kept) == (0,)
    assert kept.sha256 == now.sha256
    assert {*chat.ends(chat.settled(kept))} == {0, 3}  # a new run that begins with it


@pytest.mark.parametrize(("asked", "end"), [("chatml", "<|im_end|>"), ("plain", "<|endoftext|>")])
@pytest.mark.parametrize("known", [True, False])
def test_a_base_gets_a_template(asked, end, known, tmp_path):
    """`known`: its vocabulary has ChatML's tokens, as Qwen's bases have. What other texts become stays."""
    base = theirs(tmp_path, "", tiny_hf.CHATML if known else ("<|endoftext|>",))
    grown = chat.grown(base, asked)
    assert grown.vocab_size == base.vocab_size + (0 if known or asked == "plain" else 2)
    assert grown.encode(tiny_hf.TEXTS[0]) == base.encode(tiny_hf.TEXTS[0])
    assert chat.answer_end(grown) == grown.controls[end]
    assert chat.own_rows(grown) == (("<|im_start|>", "<|im_end|>") if asked == "chatml" else ())
    written = chat.Writer(grown).written(TALK, None)
    assert [written.text[span.first : span.behind].strip() for span in written.spans] == [f"Ho{end}"]
    assert chat.Writer(grown).write(TALK[:1], reply=True) == written.text[: written.spans[0].first]
    coder.write(chat.settled(grown), tmp_path / "run")
    again = coder.load(tmp_path / "run")
    assert (again.sha256, chat.ends(again), chat.template(again)) == (
        grown.sha256,
        chat.ends(grown),
        chat.template(grown),
    )


def test_an_end_that_is_no_token_is_told(tmp_path):
    said = chat.told_ends(theirs(tmp_path, QWEN, ("<|endoftext|>",)))
    assert said.startswith("the chat template writes <|im_end|>, which is no token of this vocabulary, after an answer")


def test_what_a_text_begins_with_is_in_the_template(tmp_path):
    tiny_hf.byte_fallback(tmp_path)
    grown = chat.grown(coder.load(tmp_path), "plain")
    assert chat.Writer(grown).write(TALK[:1], reply=True).startswith("<s>User: Hi")
    assert chat.ids(grown, TALK).count(1) == 1


def test_templates_that_do_not_suit(ours, tmp_path):
    speaks, base = theirs(tmp_path / "a", QWEN), theirs(tmp_path / "b", "")
    (tmp_path / "own.jinja").write_text(WITH_EOS)
    (tmp_path / "empty.jinja").write_text("\n")
    assert chat.template(chat.grown(speaks, str(tmp_path / "own.jinja"))) == WITH_EOS
    for tokenizer, asked, why in (
        (speaks, "chatml", "the model has a chat template of its own"),
        (base, "chatlm", r"can't be read .*: chatml, plain, or a file"),
        (base, f"{tmp_path}/empty.jinja", r"can't be read \(it is empty\): chatml, plain, or a file"),
        (ours, "chatml", "this model uses jaxlm's ChatML"),
    ):
        with pytest.raises(ConfigError, match=f"^config.examples.template={asked}:? {why}"):
            chat.grown(tokenizer, asked)


def test_the_day_of_a_template_is_the_run_s(tmp_path, monkeypatch):
    """The same after midnight and in another time zone; for a run that was begun before it is its first start's."""
    tokenizer = theirs(tmp_path / "model", tiny_hf.LLAMA3_TEMPLATE, tiny_hf.LLAMA3)
    day = datetime.datetime(2024, 2, 29, 23, 50, tzinfo=datetime.timezone(datetime.timedelta(hours=9)))
    moment = ledger.moment(tmp_path, lambda: day)
    assert datetime.datetime.fromisoformat(moment) == day
    text = chat.Writer(chat.dated(tokenizer, moment)).write(TALK, reply=False)
    monkeypatch.setenv("TZ", "Pacific/Kiritimati")
    time.tzset()
    try:
        assert ledger.moment(tmp_path, lambda: day + datetime.timedelta(days=400)) == moment
        assert chat.Writer(chat.dated(tokenizer, moment)).write(TALK, reply=False) == text
    finally:
        monkeypatch.undo()
        time.tzset()
    assert datetime.datetime.now().strftime("%d %b %Y") in chat.Writer(tokenizer).write(
        TALK, reply=False
    )  # chat, serve
    (tmp_path / "run.json").write_text(json.dumps({"starts": [{"time": "2023-05-05T12:00:00.000+00:00"}]}))
    assert "05 May 2023" in chat.Writer(chat.dated(tokenizer, ledger.moment(tmp_path))).write(TALK, reply=False)
    assert "moment" not in ledger.read(
        tmp_path
    )  # in another time zone it may be another day: then the resume is refused
    (tmp_path / "run.json").write_text(json.dumps({"starts": [], "moment": ["yesterday"]}))
    assert files.is_moment(ledger.moment(tmp_path))


def test_benchmarks_ask_the_same_on_every_day(tmp_path):
    first = datetime.datetime(2024, 2, 29, 12, tzinfo=datetime.UTC)
    moment = results.moment(tmp_path, lambda: first)
    result = results.TaskResult("t", {}, {}, None, 0, [])
    for step, when in ((3, moment), (5, "2025-01-01T00:00:00+00:00")):
        results.write(tmp_path, [result], {"step": step, "moment": when})
    assert results.moment(tmp_path) == moment
    (tmp_path / "eval/3/results.json").write_text('{"tasks": {"t": [7]}}')
    assert results.moment(tmp_path) == "2025-01-01T00:00:00+00:00"
    assert os.listdir(tmp_path) == ["eval"]


@pytest.mark.parametrize(
    "damage", [{"rows": [7]}, {"rows": 7}, {"ends": 7}, {"ends": {"a": 1}}, {"rows": None}, {"ends": None}]
)
def test_damaged_ids_are_a_line(damage, tmp_path):
    tokenizer = theirs(tmp_path / "model", QWEN)
    coder.write(tokenizer, tmp_path / "run")
    (tmp_path / "run" / imported.IDS).write_text(json.dumps({"eos_id": 0, "bos_id": None, "opening": []} | damage))
    with contextlib.suppress(ConfigError):  # and no other error
        assert chat.ends(coder.load(tmp_path / "run"))
