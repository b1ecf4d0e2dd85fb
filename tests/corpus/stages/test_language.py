"""Languages are told apart, also when the page begins in another one; code passes."""

import collections
import sys
import types

import numpy as np
import pytest
import tiny_manual
import tiny_stage

from jaxlm.config import ConfigError
from jaxlm.corpus.stages import language

TEXTS = {
    "en": "The children play by the river in the afternoon, and nobody tells them to come home before it is dark.",
    "de": "Die Kinder spielen am Nachmittag am Fluss, und niemand ruft sie nach Hause, bevor es dunkel wird.",
    "fr": "Les enfants jouent au bord de la rivière l'après-midi, et personne ne les appelle avant la nuit.",
    "ru": "Дети играют у реки после обеда, и никто не зовёт их домой до темноты.",  # noqa: RUF001
    "zh": "孩子们下午在河边玩耍，天黑之前没有人叫他们回家。",  # noqa: RUF001
    "ja": "子どもたちは午後に川のそばで遊び、暗くなるまで誰も家に呼びません。",
}


@pytest.mark.parametrize("code", TEXTS)
def test_only_the_languages_asked_for_stay(code):
    outcome = tiny_stage.apply(tiny_stage.make("language"), TEXTS[code])
    assert outcome.metadata["language_id"] == code
    assert outcome.reason == ("" if code == "en" else "other language")
    assert tiny_stage.apply(tiny_stage.make("language", languages=("en", code)), TEXTS[code]).removed is None
    assert tiny_stage.apply(tiny_stage.make("language", languages=()), TEXTS[code]).removed is None


def test_scores_are_py3langids():
    from py3langid import langid

    theirs, ours = langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True), language._py3langid()
    texts = [
        *TEXTS.values(), " ".join(TEXTS.values()), "", "a", "é", "ß?", "12", "SHOUTED", "e\u0301", "\x00\x01", "🙂" * 9,
    ]  # fmt: skip
    for text in texts:
        (label, score), (our_label, our_score) = theirs.classify(text), ours.classify(text)
        assert (our_label, our_score) == (label, pytest.approx(score, abs=1e-4)), text
        counts = langid.visit_counts(theirs.tk_nextmove, theirs._rowbase, theirs.tk_output, text.encode())
        features = ours.tk_output[ours._states(np.frombuffer(text.encode(), np.uint8))]
        assert collections.Counter(features[features >= 0].tolist()) == (counts or {}), text


def test_all_workers_read_the_model_that_was_built(tmp_path):
    built, own = tiny_stage.make("language", tmp_path), tiny_stage.make("language")
    for text in [*TEXTS.values(), " ".join(TEXTS.values()), "", "12"]:
        assert tiny_stage.apply(built, text) == tiny_stage.apply(own, text)


def test_prose_alone_is_judged():
    german = "\n".join(f"int zahl_{i} = lies_naechste_zeile(datei, puffer_{i});" for i in range(40))
    page = f"{TEXTS['en']}\n\n```c\n{german}\n```\n\n{TEXTS['en']} See [this](http://x.de/die/und/nicht/der).\n"
    assert language.prose(page).split() == f"{TEXTS['en']} {TEXTS['en']} See [this] .".split()
    assert language.prose("a `und` b\n\n    Eine Zeile\n    und noch eine\n", markdown=True).split() == ["a", "b"]
    assert language.prose("    Die Zeile ist eingerückt.").strip() == "Die Zeile ist eingerückt."
    outcome = tiny_stage.apply(tiny_stage.make("language"), page)
    assert (outcome.metadata["language_id"], outcome.reason) == ("en", "")


def test_what_is_uncertain_may_stay():
    kept = tiny_stage.make("language min_score=0.9 keep_doubtful=True")
    strict = tiny_stage.make("language min_score=0.9")
    for page in (tiny_manual.RMI, tiny_manual.SHORT, "12 34 56 7.8 9,0 " * 5, "", "| `a` | `b` |\n|---|---|\n" * 9):
        assert tiny_stage.apply(kept, page, format="markdown").removed is None, page
        bare = page not in (tiny_manual.RMI, tiny_manual.SHORT)
        assert bool(tiny_stage.apply(strict, page, format="markdown").removed) == bare, page
    assert tiny_stage.apply(kept, tiny_manual.GERMAN).reason == "other language"
    assert tiny_stage.apply(strict, "x = [0] * 7\nfür = x", format="code").removed is None


@pytest.mark.parametrize("code", ["de", "fr", "ru", "zh", "ja"])
def test_names_lists_and_quotations_are_no_evidence(code):
    names = (
        "Krzysztof Nowakowski, Małgorzata Zielińska, Søren Kjærgaard, Ingrid Blomqvist, Jürgen Köhler, Zoë Müller. " * 3
    )
    for stage in (tiny_stage.make("language"), tiny_stage.make("language min_score=0.9 keep_doubtful=True")):
        assert tiny_stage.apply(stage, names).removed is None
        assert (
            tiny_stage.apply(stage, "200 g farina, 3 uova, burro, zucchero, olio, sale, 1/2 l latte; " * 5).removed
            is None
        )
        assert tiny_stage.apply(stage, f'{TEXTS["en"]} "{TEXTS[code][:80]}"').removed is None
        assert tiny_stage.apply(stage, f"{TEXTS[code]} {TEXTS['en']}").removed is None  # half of it is English
        assert tiny_stage.apply(stage, names + (TEXTS[code] + "\n") * 3).reason == "other language"


def test_running_text_is_words_in_a_row():
    assert language.running_text("Sia v = at + v₀, con a = 9,81 m/s² e v₀ = 0; burro, uova di casa, sale.") == {}
    assert language.running_text("Das Buch: er liest es am Abend gern, Anna Maria Luise Klein.") == {
        "er liest es am Abend gern Anna Maria Luise Klein": 20  # without the names
    }
    assert list(language.running_text("夜は本を読む。")) == ["夜は本を読む。"]


def test_a_long_text_is_judged_by_all_of_it():
    menu = "Home | Products | About us | Contact | Login | Sign up for our newsletter\n"
    text = menu * 3 + TEXTS["de"] * 100
    assert tiny_stage.apply(tiny_stage.make("language"), text).reason == "other language"
    assert language.sample("abc" * 1000, 300).count(" ") == 2
    assert len(language.sample("abc" * 1000, 300)) == 302


def test_bad_settings(tmp_path):
    with pytest.raises(ConfigError, match=r"no language 'eng'.*'en'"):
        tiny_stage.make("language", tmp_path, languages=("eng",))
    with pytest.raises(ConfigError, match="sample_chars"):
        tiny_stage.make("language sample_chars=10", tmp_path)


def test_a_fasttext_model_takes_the_place(tmp_path, monkeypatch):
    (tmp_path / "lid.ftz").write_bytes(b"")

    class Model:
        def predict(self, text):
            assert "\n" not in text  # fastText refuses it
            return ("__label__de",) if "Kinder" in text else ("__label__en",), [0.75]

    monkeypatch.setitem(sys.modules, "fasttext", types.SimpleNamespace(load_model=lambda path: Model()))
    stage = tiny_stage.make("language", tmp_path, model=str(tmp_path / "lid.ftz"))
    assert tiny_stage.apply(stage, TEXTS["en"].replace(" by ", "\nby ")).removed is None
    assert tiny_stage.apply(stage, TEXTS["de"]).reason == "other language"
    uncertain = tiny_stage.make("language min_score=0.8", model=str(tmp_path / "lid.ftz"))
    assert tiny_stage.apply(uncertain, TEXTS["en"]).reason == "uncertain language"
    with pytest.raises(ConfigError, match="no such file"):
        tiny_stage.make("language model=missing.ftz", tmp_path)


def test_fasttext_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fasttext", None)
    with pytest.raises(ConfigError, match="pip install fasttext"):
        tiny_stage.make("language model=lid.ftz", tmp_path)
