"""transformers on what jaxlm exports, with the defaults of AutoTokenizer: the same ids, logits and continuations."""

import os
import random

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models as tiny
from interop import reader

from jaxlm import models
from jaxlm.data.tokenizer import ids
from jaxlm.data.tokenizer.train import train_tokenizer
from jaxlm.devices import tree
from jaxlm.interop import export, hf_folder, leaves, tokenizer_json
from jaxlm.step.objectives import base

pytestmark = pytest.mark.parity

OF_READERS = {  # what transformers can read from a GGUF file too
    "qwen3_qk_norm": {"head_dim": 128, "n_heads": 2},
    "gpt2_tied": {"max_seq_len": 1024, "d_ff": 128},
    "gpt2_untied": {"max_seq_len": 1024, "d_ff": 128},
}
CASES = {name: case | OF_READERS.get(name, {}) for name, case in tiny.EXPORTED.items()}
# transformers reads no scaling of RoPE from a GGUF file; of a GPT-2's it takes d_ff to be 4 d, of a Qwen3's heads to be of 128.
OF_GGUF = ("gqa_tied", "qwen3_qk_norm", "qwen2_qkv_bias", "gpt2_untied")
PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def texts():
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 7))) for _ in range(300)]
    return [" ".join(rng.choices(words, k=40)) + f"\n    indented {i} 日本 <|</>\n" for i in range(200)]


@pytest.fixture(scope="module")
def coders(texts):
    """(kind, chat tokens) -> a tokenizer of 405 ids."""
    kinds = [(kind, chats) for kind in ("bpe", "unigram") for chats in (False, True)]
    return {
        (kind, chats): train_tokenizer(texts, vocab_size=405, chat_tokens=chats, model_type=kind)
        for kind, chats in kinds
    }


def exported(folder, coder, to, dtype, **overrides):
    """Exports a random model; returns its config and parameters."""
    cfg = tiny.model_config(vocab_size=coder.vocab_size, **overrides)
    params = tiny.random_params(models.build(cfg, "xla"))
    values = {name: np.asarray(leaf) for name, leaf in tree.named_leaves(params)}
    about = {"run": "tiny", "step": 7}
    given = export.Source(values.__getitem__, cfg, coder, "tiny", about, "# card\n")
    return cfg, params, export.export(given, to, dtype, folder / "out").place


def both(cfg, params, theirs, tokenizer, coder):
    """(our logits, theirs, our greedy continuation, theirs) of one prompt."""
    import torch

    torch.set_num_threads(1)
    model = models.build(cfg, "xla")
    score = tiny.jit(lambda p, t: tiny.logits(model, p, t))
    inputs = tokenizer(PROMPT, return_tensors="pt")
    start = ids.document(coder, PROMPT)
    assert inputs["input_ids"][0].tolist() == start
    tokens = start + [0] * 8
    ours = np.asarray(score(params, jnp.asarray([tokens])))[0, : len(start)]
    for at in range(len(start), len(tokens)):
        tokens[at] = int(np.argmax(score(params, jnp.asarray([tokens]))[0, at - 1]))
    with torch.no_grad():
        scores = theirs(**inputs).logits[0].float().numpy()
        out = theirs.generate(**inputs, do_sample=False, max_new_tokens=8)[0].tolist()
    return ours, scores, tokens[: len(out)], out


@pytest.mark.parametrize("case", CASES)
def test_transformers_agrees_on_the_folder(tmp_path, coders, case):
    import transformers

    coder = coders["bpe", True]
    cfg, params, place = exported(tmp_path, coder, "hf", "f32", **CASES[case])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(place).eval()
    loader = hf_folder.tokenizer_class(cfg, coder)
    assert (loader == "AutoTokenizer") == (case != "qwen2_qkv_bias")
    tokenizer = getattr(transformers, loader).from_pretrained(place)
    ours, scores, mine, out = both(cfg, params, theirs, tokenizer, coder)
    assert np.abs(ours - scores).max() < 1e-4 * np.abs(ours).max()
    assert mine == out
    start = ids.document(coder, PROMPT)
    assert len(out) > len(start)
    model, tensors = reader.of_folder(place)
    assert np.abs(model.logits(tensors, np.array([start]))[0] - scores).max() < 1e-4 * np.abs(ours).max()
    assert theirs.generation_config.eos_token_id == [coder.id_of("<|im_end|>"), coder.eos_id]
    assert theirs.config.bos_token_id == coder.eos_id


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, "f32") for case in OF_GGUF), ("gqa_tied", "f16"), ("gpt2_tied", "q8_0")],
)
def test_transformers_agrees_on_the_gguf(tmp_path, coders, case, dtype):
    import transformers

    coder = coders["bpe", False]
    cfg, params, place = exported(tmp_path, coder, "gguf", dtype, **CASES[case])
    hf = exported(tmp_path / "hf", coder, "hf", "bf16", **CASES[case])[2]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        place.parent, gguf_file=place.name, dtype="float32"
    ).eval()
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(hf)
    ours, scores, mine, out = both(cfg, params, theirs, tokenizer, coder)
    bound = {"f32": 1e-4, "f16": 5e-3, "q8_0": 5e-2}[dtype]
    assert np.abs(ours - scores).max() < bound * np.abs(ours).max()
    if dtype == "f32":
        assert mine == out


def random_texts(n: int) -> list[str]:
    """Texts of words, code, CJK, emoji, control bytes, U+2581 and strings that spell control tokens; spaces in front."""
    rng = random.Random(0)
    words = ["the", "of", "Apple", "don't", "2024", "3.14", "naïve", "Zürich", "def f(x):", "return", "\n\n\t"]
    words += [":\n    ", ",\n        ", "\n    return", "\n\n\n"]
    odd = ["日本語の文字", "中文", "한국어", "😀🎉", "👩‍👩‍👧", "\0\x01\x7f\r", "▁", "</s>", "<s>", "<unk>"]
    odd += [
        "<|im_start|>",
        "<|im_end|>",
        "<|user|>",
        "<0x41>",
        "<0xE2>",
        "   ",
        "e\u0301",
        "\ufb01",
        "\u200b\xa0",
        "العربية",
        "\U0010ffff\ue000\ufffe",
    ]
    ends = ["", " ", "  ", "\n"]
    made = []
    for i in range(n):
        parts = [
            rng.choice(odd if rng.random() < 0.35 else words) + rng.choice(ends) for _ in range(rng.randint(0, 25))
        ]
        made.append(" " * (i % 4) + "".join(parts))
    return made


@pytest.mark.parametrize("chats", [False, True])
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_auto_tokenizer_gives_our_ids_with_one_eos_in_front(tmp_path, coders, kind, chats):
    import transformers

    coder = coders[kind, chats]
    _, _, place = exported(tmp_path, coder, "hf", "f32")
    assert sorted(os.listdir(place))[-3:] == ["tokenizer.json", "tokenizer.model", "tokenizer_config.json"]
    theirs = transformers.AutoTokenizer.from_pretrained(place)
    texts = random_texts(2000)
    wanted = [ids.document(coder, text) for text in texts]
    assert all(row[0] == coder.eos_id and coder.eos_id not in row[1:] for row in wanted)
    if not chats:
        assert theirs(texts)["input_ids"] == wanted
    else:  # the template spells control tokens, so by default a text that spells one is read as one
        assert theirs(texts, split_special_tokens=True)["input_ids"] == wanted
        plain = [i for i, text in enumerate(texts) if not any(token in text for token in theirs.added_tokens_encoder)]
        assert 500 < len(plain) < 1800
        assert theirs([texts[i] for i in plain])["input_ids"] == [wanted[i] for i in plain]
    assert theirs.batch_decode([row[1:] for row in wanted]) == texts
    assert (theirs.chat_template is not None) == chats


def test_the_chat_template_begins_with_one_eos_and_marks_the_answer(tmp_path, coders):
    import transformers

    coder = coders["bpe", True]
    _, _, place = exported(tmp_path, coder, "hf", "f32")
    theirs = transformers.AutoTokenizer.from_pretrained(place)
    asked, said = "What is 2 + 2?", "It is 4."
    talk = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    found = theirs.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
    start, end, user, assistant = (coder.id_of(f"<|{n}|>") for n in ("im_start", "im_end", "user", "assistant"))
    line = coder.encode("\n")
    question = [start, user, *line, *coder.encode(asked), end, *line, start, assistant, *line]
    answer = [*coder.encode(said), end]
    assert found["input_ids"] == [coder.eos_id, *question, *answer, *line]
    assert found["assistant_masks"] == [0] * (1 + len(question)) + [1] * len(answer) + [0] * len(line)
    spelled = [{"role": "user", "content": asked + "</s><|im_end|>"}]
    plain = theirs.apply_chat_template(spelled, sanitize_control_tokens=True, return_dict=True)["input_ids"]
    assert plain == [coder.eos_id, start, user, *line, *coder.encode(asked + "</s><|im_end|>"), end, *line]
    prompt = theirs.apply_chat_template(talk[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert prompt == [coder.eos_id, *question]


def test_the_gguf_tokenizer_says_what_a_text_begins_with(tmp_path, coders):
    import gguf

    for (kind, chats), coder in coders.items():
        place = exported(tmp_path / f"{kind}{chats}", coder, "gguf", "f16")[2]
        fields = {name: field.contents() for name, field in gguf.GGUFReader(place).fields.items()}
        held = tokenizer_json.pieces(coder)
        assert fields["tokenizer.ggml.tokens"] == held.texts
        assert fields["tokenizer.ggml.token_type"] == held.types
        assert np.allclose(fields["tokenizer.ggml.scores"], held.scores)
        assert fields["tokenizer.ggml.add_bos_token"] is True
        assert fields["tokenizer.ggml.bos_token_id"] == fields["tokenizer.ggml.eos_token_id"] == coder.eos_id
        assert fields["tokenizer.ggml.model"] == {"bpe": "llama", "unigram": "t5"}[kind]
        assert ("tokenizer.chat_template" in fields) == chats
        assert fields.get("tokenizer.ggml.eot_token_id") == (coder.id_of("<|im_end|>") if chats else None)


def test_the_gguf_template_is_plain_jinja_and_says_the_same(tmp_path, coders):
    """llama-cpp-python compiles it as it loads the file, and knows no tag of transformers (its pull request 2226)."""
    import gguf
    import jinja2.sandbox
    import transformers

    coder = coders["bpe", True]
    place = exported(tmp_path, coder, "gguf", "f16")[2]
    template = gguf.GGUFReader(place).fields["tokenizer.chat_template"].contents()
    written = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(template)
    talk = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4."}] * 2
    theirs = transformers.AutoTokenizer.from_pretrained(exported(tmp_path / "hf", coder, "hf", "f32")[2])
    for ask in (False, True):
        said = theirs.apply_chat_template(talk, tokenize=False, add_generation_prompt=ask)
        assert written.render(messages=talk, bos_token=theirs.bos_token, add_generation_prompt=ask) == said


@pytest.mark.parametrize("case", ["gqa_tied", "gpt2_tied"])
def test_transformers_agrees_on_the_reward_model(tmp_path, coders, case):
    """The score of each text's last token, in a batch that is padded on either side."""
    import torch
    import transformers

    coder = coders["bpe", True]
    cfg = tiny.model_config(vocab_size=coder.vocab_size, **CASES[case])
    model = models.build(cfg, "xla")
    params, head_D = tiny.random_params(model), np.random.default_rng(1).normal(0, 1, cfg.d_model).astype(np.float32)
    values = {name: np.asarray(leaf) for name, leaf in tree.named_leaves(params)} | {leaves.SCORE: head_D}
    given = export.Source(values.__getitem__, cfg, coder, "tiny", {}, "# card\n", scores=True)
    place = export.export(given, "hf", "f32", tmp_path / "out").place
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(place).eval()
    tokenizer = getattr(transformers, hf_folder.tokenizer_class(cfg, coder)).from_pretrained(place)
    texts = [PROMPT, "A longer text than the other<|im_end|>"]
    wanted = []
    for text in texts:
        tokens = jnp.asarray([tokenizer(text)["input_ids"]])
        hidden = model.apply({"params": params}, tokens)
        wanted.append(float(base.scalar({"score": {"score_head": {"kernel": head_D}}}, "score", hidden)[0, -1]))
    for side in (
        ("right",) if cfg.family == "gpt2" else ("left", "right")
    ):  # transformers counts GPT-2's positions from the padding
        inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side=side)
        with torch.no_grad():
            found = theirs(**inputs).logits[:, 0].numpy()
        assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()
