"""Tokenizers from elsewhere: their bytes are counted, control strings stay text, what a text begins with is read."""

import json
import pickle
import shutil

import numpy as np
import pytest
import tiny_chats
import tiny_data
import tiny_hf

from jaxlm.config import ConfigError
from jaxlm.data.chats import chat
from jaxlm.data.shards import build, shards
from jaxlm.data.tokenizer import coder, ids
from jaxlm.data.tokenizer.ours import GUARD
from jaxlm.data.tokenizer.train import train_tokenizer
from jaxlm.interop import export, hf_config, hf_folder

tokenizers = pytest.importorskip("tokenizers")

HARD = [
    "Hello world, this is  a test.\n\tdef f(x): return x\n", "  leading, trailing  ",
    "日本語 é e\u0301 👩\u200d👩\u200d👧 \U0010ffff", "\0\x01\x7f\r\n\n\n", "12345 1e-10", "x" * 3000,
]  # fmt: skip
CONTROLS = ["<|endoftext|> a <|im_start|>user", "<s>a</s> <unk>"]
KINDS = {"byte_level": tiny_hf.byte_level, "byte_fallback": tiny_hf.byte_fallback}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Kind -> a folder with such a tokenizer."""
    root = tmp_path_factory.mktemp("tokenizers")
    for name, make in KINDS.items():
        make(root / name)
    return root


@pytest.mark.parametrize("kind", KINDS)
def test_every_text_comes_back_and_its_bytes_are_counted(folders, kind):
    c = coder.load(folders / kind)
    front, lengths = (b" " if kind == "byte_fallback" else b""), c.token_bytes()
    texts = HARD + CONTROLS
    for text, coded in zip(texts, c.encode_batch(texts), strict=True):
        assert c.decode(coded) == text
        assert c.decode(coded, follows=True) == front.decode() + text
        assert lengths[coded].sum() == len(front + text.encode())
        assert b"".join(c.piece_bytes()[i] for i in coded) == front + text.encode()
        assert coded.tolist() == c.encode(text)
        assert not {c.eos_id, *c.opening} & set(coded.tolist())
    assert c.decode([c.eos_id, c.vocab_size + 5, *c.encode("a")], follows=True) == front.decode() + "a"
    assert len(c.byte_ids()) == 256
    assert (lengths[c.byte_ids()] == 1).all()
    assert c.encode("\ud800a") == c.encode("?a")
    with pytest.raises(ConfigError, match="no token <nothing>"):
        c.id_of("<nothing>")


def test_bpe_dropout_is_off_in_ids_and_in_exports_and_said(folders, tmp_path):
    """Of a tokenizer that drops nine merges of ten each text has the ids that it has without."""
    shutil.copytree(folders / "byte_level", tmp_path / "a")
    spec = json.loads((tmp_path / "a/tokenizer.json").read_text())
    spec["model"]["dropout"] = 0.9
    (tmp_path / "a/tokenizer.json").write_text(json.dumps(spec))
    plain, dropping = coder.load(folders / "byte_level"), coder.load(tmp_path / "a")
    text = tiny_hf.TEXTS[0]
    assert (
        dropping.encode(text)
        == dropping.encode_marked(text)
        == dropping.encode_batch([text])[0].tolist()
        == plain.encode(text)
    )
    hf_folder.write_tokenizer(tmp_path, dropping, 64)
    assert tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids == plain.encode(text)
    export.check_tokenizer(tmp_path, dropping)
    tiny_hf.weights(tmp_path / "a", vocab_size=400)
    assert hf_config.read(tmp_path / "a")[2] == [
        "tokenizer.json has a BPE dropout of 0.9: it is off, so that a text always has the same ids"
    ]


def test_what_a_text_begins_with(folders, tmp_path):
    assert (coder.load(folders / "byte_level").opening, coder.load(folders / "byte_level").separator_id) == ((), 0)
    fallback = coder.load(folders / "byte_fallback")
    assert (fallback.opening, fallback.separator_id, fallback.eos_id) == ((1,), 1, 2)
    assert ids.document(fallback, "a") == [1, *fallback.encode("a")]
    # The post-processor alone decides (see test_what_a_text_begins_with_is_what_transformers_puts_there).
    tiny_hf.byte_fallback(tmp_path / "without", add_bos_token=False)
    assert coder.load(tmp_path / "without").opening == (1,)
    tiny_hf.byte_level(tmp_path / "with", add_bos_token=True, bos_token={"content": "<|im_start|>"})
    assert coder.load(tmp_path / "with").opening == ()
    # The end of a text may stand in the model's config.json alone; nowhere is refused.
    tiny_hf.byte_level(tmp_path / "none", eos_token=None)
    with pytest.raises(ConfigError, match="does not say which token ends a text"):
        coder.load(tmp_path / "none")
    (tmp_path / "none/config.json").write_text('{"eos_token_id": [2, 0]}')
    assert coder.load(tmp_path / "none").eos_id == 2


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_pickled_and_kept_with_its_ids(folders, kind, tmp_path):
    c = coder.load(folders / kind)
    coder.write(c, tmp_path)
    for other in (pickle.loads(pickle.dumps(c)), coder.load(tmp_path), coder.read(c.files, "x")):
        assert (other.sha256, other.opening, other.vocab_size) == (c.sha256, c.opening, c.vocab_size)
        assert other.encode(HARD[0]) == c.encode(HARD[0])


def test_a_data_directory_holds_it(folders, tmp_path):
    """Its data needs the model's folder no more, and is opened and read like any other."""

    def read(source, stats):
        for i in range(12):
            stats.documents += 1
            yield f"{i}", f"{tiny_data.WORDS} {i}."

    settings = build.BuildSettings(0, False, val_fraction=0.2, tokenizer_path=str(folders / "byte_fallback"))
    sources = [build.Source("a", "test:a", 1.0)]
    data = build.build_data(tmp_path / "data", sources, settings, read=read, log=lambda line: None)
    c = data.tokenizer()
    assert (tmp_path / "data/tokenizer_ids.json").is_file()
    assert c.sha256 == coder.load(folders / "byte_fallback").sha256 == data.manifest["tokenizer"]["sha256"]
    document = data.documents("a", "train", 0, 5)[0]
    tokens = data.stream("a").read(document.start, document.start + document.tokens)
    assert c.decode(tokens).startswith("one two three")
    assert coder.load(tmp_path / "data").sha256 == c.sha256
    path = tmp_path / "data/tokenizer_ids.json"
    path.write_bytes(path.read_bytes().replace(b"1", b"2"))
    with pytest.raises(shards.ConfigError, match="tokenizer_ids"):
        shards.open_data(tmp_path / "data")


def test_tokenizer_model_of_another_model(tmp_path):
    """Where there is no tokenizer.json: SentencePiece itself, with BOS in front; ours stay as they are."""
    ours = train_tokenizer([f"{tiny_data.WORDS} {i}" for i in range(50)], vocab_size=320, chat_tokens=False)
    (tmp_path / "tokenizer.model").write_bytes(ours.model_bytes)
    assert coder.load(tmp_path).sha256 == ours.sha256
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "bos_token_id": 1, "eos_token_id": 2}))
    theirs = coder.load(tmp_path)
    assert (theirs.opening, theirs.separator_id, theirs.eos_id) == ((1,), 1, 2)
    assert theirs.sha256 != ours.sha256
    for text in HARD:
        assert theirs.encode(text) == ours.encode(text)
        assert theirs.decode(theirs.encode(text)) == text
    assert pickle.loads(pickle.dumps(theirs)).opening == (1,)
    for settings, opening in (
        ({"add_bos_token": False}, ()),
        ({"add_bos_token": True}, (1,)),
        ({"add_eos_token": True}, ()),
    ):
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps({"bos_token": "<s>", "eos_token": "</s>"} | settings)
        )
        assert coder.load(tmp_path).opening == opening


def test_a_space_in_front_of_every_text(tmp_path):
    """Llama 2's tokenizer.model puts one there (add_dummy_prefix), once for a text and not for each of its parts."""
    from sentencepiece import sentencepiece_model_pb2

    ours = train_tokenizer([f"{tiny_data.WORDS} {i}" for i in range(50)], vocab_size=320, chat_tokens=False)
    model = sentencepiece_model_pb2.ModelProto.FromString(ours.model_bytes)
    model.normalizer_spec.add_dummy_prefix = True
    (tmp_path / "tokenizer.model").write_bytes(model.SerializeToString())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "bos_token_id": 1, "eos_token_id": 2}))
    theirs = coder.load(tmp_path)
    long = "one two\n" * 20_000  # longer than what is encoded at once without such a space
    for text in ("one two", " one", long):
        assert theirs.encode(text) == ours.encode(f" {text}")
        assert theirs.decode(theirs.encode(text)) == text


def test_what_is_refused(folders, tmp_path):
    with pytest.raises(ConfigError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        coder.load(tmp_path)
    spec = json.loads((folders / "byte_level/tokenizer.json").read_text())
    for change, message in (
        ({"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}, "WordPiece"),
        (None, "read"),
    ):
        content = json.dumps(spec | change) if change else "{"
        (tmp_path / "tokenizer.json").write_text(content)
        (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
        with pytest.raises(ConfigError, match=message) as error:
            coder.load(tmp_path)
        assert "\n" not in str(error.value)


@pytest.mark.parity
@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_transformers(folders, kind):
    """By AutoTokenizer's defaults, with the opening in front; what spells a control token apart."""
    transformers = pytest.importorskip("transformers")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folders / kind), coder.load(folders / kind)
    for text in HARD:
        assert ids.document(ours, text) == theirs(text).input_ids
    assert any(ids.document(ours, text) != theirs(text).input_ids for text in CONTROLS)
    assert theirs.eos_token_id == ours.eos_id
    assert np.asarray(theirs(HARD[0]).input_ids)[: len(ours.opening)].tolist() == list(ours.opening)


@pytest.mark.parity
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("PreTrainedTokenizerFast", {"add_bos_token": False}),
        ("PreTrainedTokenizerFast", {"add_eos_token": True}),
        ("LlamaTokenizer", {"add_bos_token": True}),
    ],
)
def test_what_a_text_begins_with_is_what_transformers_puts_there(tmp_path, kind, settings, name):
    """With a tokenizer.json, whatever tokenizer_config.json says of BOS and EOS."""
    transformers = pytest.importorskip("transformers")
    named = {"bos_token": "<|im_start|>"} if kind == "byte_level" else {}
    KINDS[kind](tmp_path, tokenizer_class=name, **named, **settings)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), coder.load(tmp_path)
    assert len(ours.opening) == (kind == "byte_fallback")
    assert theirs("").input_ids == list(ours.opening) == ids.document(ours, "")
    if name == "PreTrainedTokenizerFast":  # the other splits words in its own way
        assert theirs("the cat").input_ids == ids.document(ours, "the cat")


@pytest.mark.parametrize("kind", KINDS)
def test_ids_in_front_of_a_cut(folders, kind):
    """As many as the text in front has by itself, if it has the same; as for our own tokenizers."""
    c = coder.load(folders / kind)
    control = max(c.controls, key=len)
    texts = ["", "the cat sat", f"{control}the dog\n{control}ran", f"the {control[0]}{GUARD}{control[1:]} cat", "日本é"]
    ends = [[0, len(text), *(text.find(control, i) + len(control) for i in range(len(text)))] for text in texts]
    cuts = [sorted({*places, 2, 5} & {*range(len(text) + 1)}) for text, places in zip(texts, ends, strict=True)]
    for text, places, (found, at) in zip(texts, cuts, c.encode_cut(texts, cuts), strict=True):
        assert found.tolist() == c.encode_marked(text)
        heads = [c.encode_marked(text[:cut]) for cut in places]
        assert at.tolist() == [len(head) if found.tolist()[: len(head)] == head else -1 for head in heads]


def test_a_prompt_opens_every_text():
    """Its virtual ids stand in front of what opened it before, once, and are no text."""
    plain = tiny_chats.tokenizer()
    prompted = coder.Prompted(plain, 3, 384)
    assert ids.document(prompted, "one") == [384, 385, 386, *ids.document(plain, "one")]
    asked = [{"role": "user", "content": "one"}]
    assert chat.ids(prompted, asked) == [384, 385, 386, *chat.ids(plain, asked)]
    assert prompted.decode(ids.document(prompted, "one")) == "one"
    assert (prompted.vocab_size, prompted.eos_id, prompted.files) == (plain.vocab_size, plain.eos_id, plain.files)
    assert coder.virtual_ids(prompted) == (384, 385, 386)
    assert coder.virtual_ids(plain) == ()
    again = pickle.loads(pickle.dumps(prompted))
    assert (again.sha256, again.opening) == (prompted.sha256, prompted.opening)
    assert len({c.sha256 for c in (plain, prompted, coder.Prompted(plain, 4, 384), coder.Prompted(plain, 3, 320))}) == 4


def test_what_a_template_opened_is_not_opened_again(folders):
    """A template that writes BOS itself, with a prompt in front too."""
    c = coder.load(folders / "byte_fallback")
    (bos,) = c.opening
    assert ids.conversation(c, "<s>the cat").count(bos) == ids.conversation(c, "the cat").count(bos) == 1
    prompted = coder.Prompted(c, 2, 512)
    for text in ("<s>the cat", "the cat"):
        assert ids.conversation(prompted, text)[:3] == [512, 513, bos]
        assert ids.conversation(prompted, text).count(bos) == 1
        ((found, at),) = ids.conversations(prompted, [text], [[0, len(text)]])
        assert found.tolist() == ids.conversation(prompted, text)
        assert at.tolist() == [2 + (not text.startswith("<s>")), len(found)]
