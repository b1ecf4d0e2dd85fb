"""Debris costs more bits than prose and repetition less; the n-gram model is a distribution; KenLM by hand."""

import base64
import json
import math
import random
import sys

import pytest
import tiny_stage

from jaxlm.config import ConfigError
from jaxlm.corpus.stages import perplexity

SUBJECTS = ["the old fisherman", "a young teacher", "my neighbour", "the king of the island", "our small dog"]
VERBS = ["looked at", "waited for", "remembered", "went away with", "often spoke about", "never understood"]
OBJECTS = [
    "the river behind the house",
    "a letter from the north",
    "the long winter",
    "three children",
    "his broken boat",
]


def prose(n: int, seed: int) -> str:
    rng = random.Random(seed)
    return " ".join(f"{rng.choice(SUBJECTS)} {rng.choice(VERBS)} {rng.choice(OBJECTS)}." for _ in range(n))


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    path = tmp_path_factory.mktemp("reference") / "good.jsonl"
    path.write_text("\n".join(json.dumps({"text": prose(20, seed)}) for seed in range(40)))
    return str(path)


@pytest.fixture(scope="module")
def folder(reference, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    perplexity.train(reference, folder)
    return folder


def test_debris_and_repetition_go(reference, tmp_path):
    line = "perplexity max_bits_per_byte=2.0 min_bits_per_byte=0.1"
    stage = tiny_stage.make(line, tmp_path, reference=reference)
    good = tiny_stage.apply(stage, prose(10, 999))
    assert good.removed is None
    assert 0.1 < good.metadata["bits_per_byte"] < 1
    debris = base64.b64encode(random.Random(0).randbytes(400)).decode()
    assert tiny_stage.apply(stage, debris).reason == "high perplexity"
    assert tiny_stage.apply(stage, "Ω猫🙂" * 20).reason == "high perplexity"
    shuffled = "".join(random.Random(0).sample(prose(10, 999), 400))
    assert tiny_stage.apply(stage, shuffled).reason == "high perplexity"
    assert tiny_stage.apply(stage, "").reason == "low perplexity"


def test_limits_come_from_the_report(reference, folder):
    report = json.loads((folder / "perplexity.json").read_text())
    bits = report["bits_per_byte"]
    assert (report["documents"], report["held_out"]) == (40, 4)
    assert 0.1 < bits["p1"] <= bits["p50"] <= bits["p99"] < 1
    assert perplexity.load(folder)(prose(20, 77)) == pytest.approx(bits["p50"], abs=0.2)


def test_the_model_is_a_distribution(folder):
    score = perplexity.load(folder)
    for context in ("the old fis", "river b", "zq", "."):
        before = score(context) * len(context)
        bits = [score(context + chr(byte)) * (len(context) + 1) - before for byte in range(128)]
        assert min(bits) > 0
        total = sum(2**-b for b in bits) + 128 * 2 ** -bits[1]  # other bytes have come as often as \x01: never
        assert total == pytest.approx(1, abs=0.01), context


def test_the_same_bytes_each_time(reference, folder, tmp_path):
    perplexity.train(reference, tmp_path)
    for name in ("ngrams.npy", "perplexity.json"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_kenlm(tmp_path):
    pytest.importorskip("kenlm")
    (tmp_path / "tiny.arpa").write_text(
        "\\data\\\nngram 1=5\nngram 2=3\n\n\\1-grams:\n-2.0\t<unk>\n0\t<s>\t-0.3\n-1.0\t</s>\n-0.7\ta\t-0.2\n-0.9\tb\t-0.1\n\n"
        "\\2-grams:\n-0.2\t<s> a\n-0.4\ta b\n-0.5\tb </s>\n\n\\end\\\n"
    )
    stage = tiny_stage.make("perplexity max_bits_per_byte=2.0", tmp_path, model=str(tmp_path / "tiny.arpa"))
    known = tiny_stage.apply(stage, "a b\n\n a  b")
    assert known.metadata["bits_per_byte"] == pytest.approx(2 * (0.2 + 0.4 + 0.5) * math.log2(10) / (4 + 6), abs=1e-4)
    assert known.removed is None
    assert tiny_stage.apply(stage, "x y z").reason == "high perplexity"
    with pytest.raises(ConfigError, match=r"model=missing\.arpa"):
        tiny_stage.make("perplexity model=missing.arpa", tmp_path)
    with pytest.raises(ConfigError, match=r"pieces=missing\.model"):
        tiny_stage.make("perplexity pieces=missing.model", tmp_path, model=str(tmp_path / "tiny.arpa"))


def test_kenlm_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "kenlm", None)
    with pytest.raises(ConfigError, match="pip install kenlm"):
        tiny_stage.make("perplexity model=a.arpa", tmp_path)


def test_a_function_by_name(tmp_path, monkeypatch):
    (tmp_path / "my_scorer.py").write_text("def make(path):\n    return lambda text: float(len(path))\n")
    monkeypatch.syspath_prepend(tmp_path)
    stage = tiny_stage.make("perplexity max_bits_per_byte=3.0", tmp_path, scorer="my_scorer:make runs/1")
    assert tiny_stage.apply(stage, "any text").metadata["bits_per_byte"] == 6
    for bad in ("my_scorer", "my_scorer:other", "no.such.module:make"):
        with pytest.raises(ConfigError, match="MODULE:FUNCTION"):
            tiny_stage.make("perplexity", tmp_path, scorer=bad)


@pytest.mark.parametrize("module", ["jaxlm.programs.restored", "jaxlm.eval.scorer"])
def test_a_models_scorer_is_found_by_its_old_name_too(tmp_path, module):
    with pytest.raises(ConfigError, match="no run in nowhere"):
        tiny_stage.make("perplexity", tmp_path, scorer=f"{module}:bits_per_byte nowhere")


def test_refusals(tmp_path):
    with pytest.raises(ConfigError, match="set one of reference"):
        tiny_stage.make("perplexity", tmp_path)
    (tmp_path / "small.txt").write_text("Too little.")
    with pytest.raises(ConfigError, match="holds 11 bytes; give 10000"):
        tiny_stage.make("perplexity", tmp_path, reference=str(tmp_path / "small.txt"))
    with pytest.raises(ConfigError, match=r"perplexity\.reference: .*no such file"):
        tiny_stage.make("perplexity reference=missing", tmp_path)
    with pytest.raises(ConfigError, match="no n-gram model"):
        perplexity.load(tmp_path)
