"""Leaked items of a benchmark are found however they are written; clean text that shares phrases with them stays."""

import collections
import gzip
import html
import json
import pathlib
import random
import string

import pytest
import tiny_items
from tiny_items import clean_text, question, zero_width

from jaxlm.config import ConfigError
from jaxlm.configs import base
from jaxlm.corpus.benchmarks import layouts
from jaxlm.corpus.stage import Document, Stage
from jaxlm.corpus.stages import decontaminate, registry

QUESTIONS = [question(random.Random(i), 1 + i % 3) for i in range(150)]


def make_stage(folder: pathlib.Path, records: list[dict], line: str = "", name: str = "bench") -> Stage:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return load_stage(folder, f'paths=("{folder}/{name}.jsonl",) {line}')


def load_stage(folder: pathlib.Path, line: str) -> Stage:
    spec = registry.parse(f"decontaminate {line}", base.get_config().prepare.stages.to_dict(), "test")
    registry.stage_class("decontaminate").build(registry.typed_settings(spec), folder / spec.key)
    return registry.make(spec, folder)


def flagged(stage: Stage, text: str):
    return stage.apply(Document(text=text, id="0"), collections.Counter())


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    return make_stage(
        tmp_path_factory.mktemp("index"), [{"id": f"q{i}", "question": q} for i, q in enumerate(QUESTIONS)]
    )


def half(text: str) -> str:
    words = text.split()
    return " ".join(words[: len(words) // 2] if len(words) % 4 < 2 else words[len(words) // 2 :])


REWRITES = {
    "verbatim": str,
    "upper": str.upper,
    "punctuation dropped": lambda text: text.translate(str.maketrans("", "", string.punctuation)),
    "punctuation blanked": lambda text: "".join(c if c.isalnum() else " " for c in text),
    "curly quotes and dashes": lambda text: text.replace("'", "\u2019").replace(", ", " \u2014 "),
    "html": html.escape,
    "html twice": lambda text: html.escape(html.escape(text)),
    "zero width": zero_width,
    "full width": lambda text: "".join(chr(ord(c) + 0xFEE0) if c.isalnum() else c for c in text),
    "broken lines": lambda text: text.replace(" ", "\n  ", 7),
    "half": half,
}


@pytest.mark.parametrize("rewrite", REWRITES)
def test_leaks_are_found(stage, rewrite):
    rng = random.Random(1)
    found = 0
    for i, q in enumerate(QUESTIONS):
        text = clean_text(rng, 60) + "\n" + REWRITES[rewrite](q) + "\n" + clean_text(rng, 60)
        removed = flagged(stage, text)
        found += removed is not None and removed.reason == "contains bench" and removed.detail.startswith(f"q{i}: ")
    assert found >= (0.9 if rewrite == "half" else 1.0) * len(QUESTIONS)


def test_clean_text_of_the_same_words_stays(stage):
    rng = random.Random(2)
    assert sum(flagged(stage, clean_text(rng, 400)) is not None for _ in range(300)) == 0
    others = [question(random.Random(1000 + i), 1 + i % 3) for i in range(300)]
    assert sum(flagged(stage, q) is not None for q in others) <= 3  # other questions of the same making


def test_short_items_must_be_whole(tmp_path):
    stage = make_stage(
        tmp_path,
        [
            {"goal": "pencil", "sol1": "can draw a line across soft paper", "sol2": "can cut steel"},
            {"question": "Which common mineral scratches glass?", "answer": "quartz"},
            {"question": "What?", "answer": "Yes."},
        ],
    )
    assert flagged(stage, "Which common MINERAL scratches glass").detail == "1: which common mineral scratches glass"
    assert flagged(stage, "This common mineral scratches glass.") is None
    assert flagged(stage, "pencil: can draw a line across soft paper").reason == "contains bench"
    assert flagged(stage, "A pencil can draw a line.") is None
    assert flagged(stage, "What? Yes.") is None


BODY = "Compute the covered surface of this polygon, whose corners the caller lists clockwise as pairs of metres from a gate."
LICENCE = "/* " + " ".join(decontaminate.NOTICES[0].split()) + " */\n"


def test_licences_tables_and_instructions_stay(tmp_path):
    table = "\n".join(" ".join(str((i * j) % 7) + ".0" for j in range(12)) for i in range(12))
    instruction = (
        "Read the passage with care, choose the single best option and explain your reasoning briefly to the examiner."
    )
    records = [{"prompt": LICENCE + BODY}]
    records += [{"prompt": "0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 1 0 0 1"}, {"prompt": table}]
    records += [{"prompt": f"{instruction} {question(random.Random(i), 1)}"} for i in range(25)]
    stage = make_stage(tmp_path, records)
    assert flagged(stage, LICENCE + "int main() { return 0; }") is None
    assert flagged(stage, "\n".join(decontaminate.NOTICES)) is None
    assert flagged(stage, table) is None
    assert flagged(stage, "0 " * 500) is None
    assert flagged(stage, f"Exam. {instruction} The river is long.") is None
    assert flagged(stage, "x " + question(random.Random(7), 1)) is not None
    assert flagged(stage, BODY) is not None


def test_texts_without_spaces(tmp_path):
    numbers = (
        "4e00 4e2a 519c 6c11 6709 4e03 53ea 9e21 548c 4e94 5934 725b ff0c 95ee 4ed6 4e00 5171 6709 591a 5c11 817f ff1f"
    )
    item = "".join(
        chr(int(number, 16)) for number in numbers.split()
    )  # a farmer has seven hens and five cows; how many legs?
    stage = make_stage(tmp_path, [{"question": item}])
    assert flagged(stage, f"\u9898\uff1a{item}\u7b54").reason == "contains bench"
    assert flagged(stage, item[:8] + "\u3002") is None


def test_the_index_is_the_same_each_time(tmp_path):
    records = [{"id": i, "question": q} for i, q in enumerate(QUESTIONS)]
    make_stage(tmp_path / "a", records)
    folders = []
    for _ in range(2):
        load_stage(tmp_path / "out", f'paths=("{tmp_path}/a/bench.jsonl",)')
        (folder,) = (tmp_path / "out").iterdir()
        folders.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert folders[0] == folders[1]


def test_a_file_of_which_nothing_can_be_indexed_is_refused(tmp_path):
    why = r"bench.jsonl: none of its 1 items has 5 words of its own \(prepare.stages.decontaminate.min_words"
    with pytest.raises(ConfigError, match=why):
        make_stage(tmp_path, [{"question": "Why?", "answer": "So."}])


def test_items_and_indexed_items_are_told_by_file(tmp_path):
    records = [{"question": q, "answer": "So."} for q in QUESTIONS[:3]]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [*records, {"question": "Why?"}]))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": r["question"]}) + "\n" for r in records))
    spec = registry.parse(f"decontaminate paths=('{tmp_path}',)", base.get_config().prepare.stages.to_dict(), "test")
    lines = registry.stage_class("decontaminate").build(registry.typed_settings(spec), tmp_path / "index")
    assert (
        lines
        == [
            f"{tmp_path}/a.jsonl: 4 items, 3 indexed (a question with answers)",
            f"{tmp_path}/b.jsonl: 3 items, 3 indexed (LAMBADA, one text)",  # b's questions are a's: found as a's, and counted
        ]
    )


@pytest.fixture(scope="module")
def every_layout(tmp_path_factory) -> Stage:
    """A stage that knows twenty made items of each layout."""
    folder = tmp_path_factory.mktemp("layouts")
    for layout in tiny_items.MADE:
        records = [made.record for made in tiny_items.made(layout)]
        (folder / f"{layout.__name__}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return load_stage(folder, f"paths=('{folder}',) fields=('{tiny_items.RIDDLES}',)")


@pytest.mark.parametrize("layout", tiny_items.MADE)
def test_made_items_of_each_layout_are_found_in_prose(every_layout, layout):
    rng, found = random.Random(4), collections.Counter()
    for made in tiny_items.made(layout):
        for name, write in tiny_items.WRITINGS.items():
            text = f"{clean_text(rng, 40)}\n{write(made.leak)}\n{clean_text(rng, 40)}"
            found[name] += flagged(every_layout, text) is not None
    assert {name: found[name] / 20 for name in tiny_items.WRITINGS} == dict.fromkeys(tiny_items.WRITINGS, 1.0)


def test_passages_alone_and_clean_prose_stay(every_layout):
    rng = random.Random(5)
    passages = [m.passage for layout in tiny_items.MADE for m in tiny_items.made(layout) if m.passage]
    assert len(passages) == 18 * 20
    assert sum(flagged(every_layout, text) is not None for text in passages) <= 0.003 * len(passages)
    clean = [*(clean_text(rng, 400) for _ in range(200)), *(tiny_items.passage(rng) for _ in range(200))]
    assert sum(flagged(every_layout, text) is not None for text in clean) <= 0.003 * len(clean)


def test_a_passage_that_were_indexed_would_be_flagged(tmp_path):
    """The mutation: the passage named as the question."""
    (tmp_path / "boolq.jsonl").write_text(
        "".join(json.dumps(m.record) + "\n" for m in tiny_items.made(tiny_items.boolq))
    )
    stage = load_stage(tmp_path, f"paths=('{tmp_path}/boolq.jsonl',) fields=('boolq.jsonl:passage>question',)")
    assert all(flagged(stage, m.passage) for m in tiny_items.made(tiny_items.boolq))


def test_bad_settings(tmp_path):
    with pytest.raises(ConfigError, match="paths is empty"):
        load_stage(tmp_path, "")
    with pytest.raises(ConfigError, match="coverage"):
        make_stage(tmp_path, [{"question": "x"}], "coverage=1.5")


def shared(name: str) -> pathlib.Path:
    path = pathlib.Path(__file__).parents[4] / "shared/data" / name
    if not path.exists():
        pytest.skip("no shared data")
    return path


@pytest.mark.shared
def test_real_benchmarks_in_real_prose(tmp_path):
    stage = load_stage(tmp_path, f'paths=("{shared("eval")}",)')
    prose = [json.loads(line)["text"] for line in gzip.open(shared("text/prose.jsonl.gz"), "rt")][::3]
    assert sum(flagged(stage, text) is not None for text in prose) <= 0.003 * len(prose)
    similar = [json.loads(line)["question"] for line in shared("text/gsm8k_train.jsonl").open()][:1000]
    assert sum(flagged(stage, text) is not None for text in similar) <= 0.003 * len(similar)
    rng = random.Random(0)
    for file in sorted(shared("eval").iterdir()):
        items, _ = layouts.items(str(file), {})
        leaks = [f"{item.questions[0]} {item.answers[0]}" for item in rng.sample(items, 50)]
        for name, rewrite in tiny_items.WRITINGS.items():
            found = [
                flagged(stage, "\n".join((rng.choice(prose)[:2000], rewrite(q), rng.choice(prose)[:2000])))
                for q in leaks
            ]
            assert sum(f is not None for f in found) >= 49, (file.name, name)
    long = [layouts.items(str(file), {})[0] for file in shared("eval").iterdir()]
    halves = [q for items in long for item in items for q in item.questions if len(q.split()) >= 26]
    for name, rewrite in REWRITES.items():
        found = [flagged(stage, "\n".join((rng.choice(prose)[:2000], rewrite(q)))) for q in rng.sample(halves, 30)]
        assert sum(f is not None for f in found) >= (27 if name == "half" else 29), name
