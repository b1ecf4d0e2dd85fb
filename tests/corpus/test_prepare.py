"""`jaxlm prepare` end to end on planted faults: the books balance, and engines, workers and crashes don't matter."""

import gzip
import hashlib
import importlib.metadata
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from jaxlm import config as config_lib
from jaxlm.config import ConfigError, RunError, config_files, older
from jaxlm.configs import base
from jaxlm.corpus import documents, engine, pipeline, prepare
from jaxlm.corpus.stage import Document, Remove
from jaxlm.corpus.stages import decontaminate, registry
from jaxlm.host import console, files, screen

COMMON = "the of and to in is that for on with as was at by an be this are from or had not but what"
WORDS = COMMON.split()
NAMES = [
    f"{a}{b}" for a in ("tal", "mor", "ven", "kis", "dor", "pel") for b in ("an", "eth", "ing", "os", "ure", "ile")
]


def text(seed, n=120):
    rng = random.Random(f"{seed}")
    sentences = []
    while n > 0:
        length = rng.randint(6, 14)
        words = [rng.choice(WORDS if rng.random() < 0.5 else NAMES) for _ in range(length)]
        sentences.append(" ".join(words).capitalize() + ".")
        n -= length
    return " ".join(sentences)


def write_corpus(folder: pathlib.Path) -> None:
    """Two sources with planted copies, near copies, addresses, a broken line and a bad byte."""
    web, books = [], []
    for i in range(60):
        web.append({"text": text(i) + f" Write to user{i}@mail-{i}.com about it."})
        books.append({"text": text(1000 + i)})
    web += [{"text": web[0]["text"]}, {"text": books[1]["text"].upper()}]
    web.append({"text": " ".join(books[2]["text"].split()[:-8]) + " and so it ended."})
    for name, records in (("web", web), ("books", books)):
        (folder / name).mkdir(parents=True)
        for part in range(3):
            lines = [json.dumps(record).encode() for record in records[part::3]]
            if name == "web" and part == 1:
                lines[3:3] = [b'{"text": "torn', json.dumps({"text": text("bad") + " caf"}).encode()[:-2] + b'\xe9"}']
            (folder / name / f"{part}.jsonl").write_bytes(b"\n".join(lines) + b"\n")


CONFIG = """
from jaxlm.configs import base

def get_config():
    c = base.get_config()
    c.model.vocab_size = 400
    c.prepare.task_mb = 0.02
    c.prepare.stages.near.bands = 6
    stages = ("unicode", "pii", "exact", "near", "lines")
    c.prepare.sources.web = base.source({web!r}, stages)
    c.prepare.sources.books = base.source({books!r}, stages, priority=5)
    return c
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder)
    (folder / "config.py").write_text(CONFIG.format(web=str(folder / "web"), books=str(folder / "books")))
    return folder


def load(corpus: pathlib.Path, out: pathlib.Path, *overrides: str) -> config_lib.Config:
    return config_lib.resolve(config_files.load(str(corpus / "config.py"), [f"data.dir={out}", *overrides]))


def run(corpus, out, *overrides) -> prepare.Prepared:
    """In this process, but where a test says otherwise."""
    c = load(corpus, out, "prepare.workers=1", *overrides)
    return prepare.prepare(c.prepare, c.data, c.engine, log=lambda line: None)


@pytest.fixture(scope="module")
def done(corpus, tmp_path_factory) -> prepare.Prepared:
    """By two workers: what other tests prepare in one process is the same."""
    return run(corpus, tmp_path_factory.mktemp("done"), "prepare.workers=2")


def test_every_document_is_accounted_for(done):
    web, books = done.manifest["sources"]["web"], done.manifest["sources"]["books"]
    assert web["read"]["documents"] == 65
    assert web["read"]["failed"] == {"malformed JSON line": 1}
    assert sum(web["read"]["repaired"].values()) == 1
    removed = {stage["name"]: sum(stage["removed"].values()) for stage in web["stages"]}
    assert removed == {"unicode": 0, "pii": 0, "exact": 2, "near": 1, "lines": 0}
    assert books["kept"]["documents"] == books["read"]["documents"] == 60  # the curated copies survive
    for source in (web, books):
        assert source["kept"]["documents"] == sum(entry["documents"] for entry in source["files"])
        assert source["stages"][-1]["bytes_out"] == source["kept"]["bytes"]
    found = [d for path in documents.find(done.path)["web"] for d in documents.read_documents(path)]
    assert len({document.id for document in found}) == len(found) == web["kept"]["documents"] == 61
    assert not any("@mail-" in document.text for document in found)
    assert all(document.metadata["source"] == "web" for document in found)


def test_what_went_is_told_with_its_reason(done):
    with gzip.open(done.path / "removed" / "near.jsonl.gz", "rt") as file:
        (record,) = map(json.loads, file)
    assert record["source"] == "web"
    assert record["reason"] == "near duplicate"
    assert record["detail"].endswith(".jsonl:1 (books)")
    assert record["excerpt"]
    reasons = {(example["stage"], example["reason"]) for example in prepare.examples(done.path)}
    assert ("exact", "duplicate") in reasons
    assert ("pii", "") in reasons  # a change, shown before and after
    clusters = json.loads((done.path / "clusters.json").read_text())
    assert clusters["sizes"] == {"2": 3}
    assert not (done.path / "work").exists()


def test_damaged_documents_are_named(done, tmp_path):
    damaged = tmp_path / "00000.parquet"
    entry = done.manifest["sources"]["web"]["files"][0]
    whole = (done.path / entry["file"]).read_bytes()
    documents.verify(done.path / entry["file"], entry["sha256"])
    noticed = 0
    for place in range(10, len(whole), len(whole) // 40):
        raw = bytearray(whole)
        raw[place] ^= 4
        damaged.write_bytes(raw)
        with pytest.raises(RunError, match=r"00000\.parquet is damaged"):
            documents.verify(damaged, entry["sha256"])
        try:
            list(documents.read_documents(damaged))
        except RunError as error:  # and no other: a changed letter of a text goes unseen here
            noticed += "00000.parquet is damaged" in str(error)
    assert noticed > 5


def test_the_first_that_fit():
    texts = [("a", "xx"), ("b", "\u00e9\u00e9"), ("c", "x")]
    assert [i for i, _ in documents.within(texts, 0)] == ["a", "b", "c"]
    assert [i for i, _ in documents.within(texts, 6)] == ["a", "b"]
    assert [i for i, _ in documents.within(texts, 5)] == ["a"]
    assert [i for i, _ in documents.within(texts, 1)] == ["a"]  # at least one


def test_what_pii_hides_stays_out_of_the_books(tmp_path):
    """Also what a cut would halve, or a quoted line end hide."""
    settings = base.get_config().prepare.stages.pii.to_dict()
    pii = registry.make(registry.StageSpec("pii", settings), tmp_path)
    pipeline.make_folders(tmp_path)
    books = pipeline.Books(tmp_path, "clean", 0, "web", [pii])
    numbers = "pay\n4111 1111 1111 1111\nphone\n+1 415 555 2671\nssn\n536-90-4399"
    books.changed("unicode", Document(f"bad char then {numbers}", "a"), f"bad\u200b char then {numbers}")
    cut = f"{'word ' * 98}john.smith.longname@post-office.org and more"
    books.removed("language", Document(cut, "b"), Remove("other", "near ann.example@post-office.org"))
    books.changed("debris", Document(f"{'x ' * 30}{cut[-50:]} end", "c"), f"{'y ' * 30}{cut[-50:]} end")
    books.close()
    removed = [gzip.decompress(path.read_bytes()).decode() for path in (tmp_path / "removed").rglob("*.gz")]
    kept = (tmp_path / "examples/clean-000000.jsonl").read_text()
    assert len(kept.splitlines()) == len(removed) == 3
    for found in (kept, *removed):
        assert "<" in found
        for secret in ("4111", "2671", "4399", "john", "smith", "ann.", "@"):
            assert secret not in found, (secret, found)


def test_an_example_of_a_change_is_the_part_that_changed(tmp_path):
    pipeline.make_folders(tmp_path)
    books = pipeline.Books(tmp_path, "clean", 0, "web")
    books.changed("unicode", Document("white space", "a"), "white  space\n")  # which shows nothing
    before, after = (f"{'a ' * 900}{word} {'b ' * 900}" for word in ("cafe", "caf\u00e9"))
    books.changed("unicode", Document(after, "b"), f"a  {before[2:]}")
    text = "The lamps of the harbour were lit early"
    page = f"<html><head>{'<style>a</style>' * 200}</head><p class=x>{text.replace('lit', '<b>lit</b>')}</p></html>"
    books.changed("html", Document(f"# Lamps\n\n{text.replace('lit', '**lit**')}", "c"), page)
    books.changed("pii", Document("ask <EMAIL>", "d"), "ask ann@example.org")
    books.close()
    records = [json.loads(line) for line in (tmp_path / "examples/clean-000000.jsonl").read_text().splitlines()]
    (b, c, d) = [(record["detail"], record["excerpt"]) for record in records]
    assert b == (before[1740:1980], after[1740:1980])
    assert ["<p class=x>The lamps of the harbour were <b>lit" in c[0], "were **lit** early" in c[1]] == [True, True]
    assert d == ("", "ask <EMAIL>")


def test_a_listed_document_goes_and_no_copy_takes_its_place(corpus, done, tmp_path, capsys):
    """Document 2 of books has a near copy in web, which the first preparation removed."""
    texts = {name: dict(documents.read_texts(paths)) for name, paths in documents.find(done.path).items()}
    original = text(1002)
    doc_id = next(doc_id for doc_id, kept in texts["books"].items() if kept == original)
    row = {
        "source": "books",
        "split": "train",
        "doc_id": doc_id,
        "sha256": hashlib.sha256(original.encode()).hexdigest(),
    }
    rows = [
        row,
        row | {"sha256": "0" * 64},
        row | {"split": "val", "sha256": hashlib.sha256(text(1003).encode()).hexdigest()},
    ]
    (tmp_path / "list.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    c = load(corpus, tmp_path / "less", "prepare.workers=1", f"prepare.sources.books.without={tmp_path}/list.jsonl")
    less = prepare.prepare(c.prepare, c.data, c.engine, log=print)
    now = {name: dict(documents.read_texts(paths)) for name, paths in documents.find(less.path).items()}
    assert texts["books"].items() - now["books"].items() == {(doc_id, original)}
    assert now["web"] == texts["web"]
    assert less.manifest["sources"]["books"]["stages"][-1]["removed"] == {"listed": 1}
    assert "1 of the 2 documents of books's list were there" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="was prepared"):
        run(corpus, tmp_path / "less")
    with pytest.raises(ConfigError, match="names no training document of web: give a list of this source"):
        run(corpus, tmp_path / "none", f"prepare.sources.web.without={tmp_path}/list.jsonl")


def test_a_second_run_does_nothing_and_another_recipe_is_refused(corpus, done):
    assert run(corpus, done.path).sha256 == done.sha256
    with pytest.raises(ConfigError, match=r"prepared with stage near = .*set another --config.data.dir"):
        run(corpus, done.path, "prepare.stages.near.threshold=0.7")


def test_finished_data_that_is_older_than_a_setting_stays(corpus, done, tmp_path):
    old = tmp_path / "old"
    shutil.copytree(done.path, old)
    manifest = json.loads((old / prepare.MANIFEST).read_text())
    for name in ("web", "books"):
        del manifest["recipe"][f"source {name}"]["exclude"]
        del dict(line for line in manifest["recipe"][f"stages of {name}"] if len(line) == 2)["pii"]["regions"]
    del manifest["recipe"]["stage lines"]["max_removed"]
    content = json.dumps(manifest)
    (old / prepare.MANIFEST).write_text(content)
    assert run(corpus, old).manifest == manifest
    for changed in ("sources.web.exclude=('_static',)", "stages.pii.regions=('DE',)", "stages.lines.max_removed=0.7"):
        with pytest.raises(ConfigError, match=r"was prepared with .* = .*nothing, now it is "):
            run(corpus, old, f"prepare.{changed}")
    assert (old / prepare.MANIFEST).read_text() == content


def test_finished_data_needs_neither_its_sources_nor_the_same_libraries(corpus, done, tmp_path, monkeypatch):
    moved = tmp_path / "moved"
    shutil.copytree(done.path, moved)
    (corpus / "web").rename(corpus / "elsewhere")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "99")
    try:
        assert run(corpus, moved).sha256 == done.sha256
    finally:
        (corpus / "elsewhere").rename(corpus / "web")
    (corpus / "web" / "new.jsonl").write_text('{"text": "one more"}\n')
    try:
        with pytest.raises(ConfigError, match="files of web"):
            run(corpus, moved)
    finally:
        (corpus / "web" / "new.jsonl").unlink()


def test_finished_data_needs_no_datatrove(corpus, done, monkeypatch):
    """A rented machine that only trains on copied data lacks its wheel (and loguru, which comes with it)."""
    code = f"""
import sys
sys.modules["datatrove"] = sys.modules["loguru"] = None  # an import of either fails
from jaxlm import config; from jaxlm.config import config_files
from jaxlm.corpus import prepare
from jaxlm.corpus.stages.registry import DOCUMENT_STAGES, stage_class
c = config.resolve(config_files.load({str(corpus / "config.py")!r}, ["data.dir={done.path}"]))
print(prepare.prepare(c.prepare, c.data, c.engine, lambda line: None).sha256)
for name in DOCUMENT_STAGES:
    stage_class(name)
"""
    opened = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (opened.stdout, opened.stderr) == (done.sha256 + "\n", "")

    def version(name):
        if name == "datatrove":
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    installed = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", version)
    assert run(corpus, done.path).sha256 == done.sha256


def test_a_changed_file_of_a_stage_is_another_recipe(corpus, tmp_path):
    words = tmp_path / "words.txt"
    words.write_text("unspeakable\n")
    stage = f"prepare.sources.web.stages=('toxicity min_score=1.0 words={words}','exact')"
    first = run(corpus, tmp_path / "d", stage)
    assert run(corpus, tmp_path / "d", stage).sha256 == first.sha256
    words.write_text("the\n")
    with pytest.raises(ConfigError, match="inputs of web/toxicity"):
        run(corpus, tmp_path / "d", stage)


def test_documents_of_a_stage_that_went_open_and_are_not_made_anew(corpus, done, tmp_path):
    """The stage `perplexity`, in a source's line and in keys of its own, as folders of older versions name it."""
    shutil.copytree(done.path, tmp_path / "d")
    manifest = json.loads((tmp_path / "d" / prepare.MANIFEST).read_text())
    settings = older.STAGES["perplexity"] | {"reference": "good/", "max_bits_per_byte": 4.0}
    manifest["recipe"]["stages of web"].insert(1, ["perplexity", settings])
    manifest["recipe"]["inputs of web/perplexity"] = "0123456789abcdef"
    (tmp_path / "d" / prepare.MANIFEST).write_text(json.dumps(manifest))
    names = "'pii','exact','near','lines')"
    line = f"prepare.sources.web.stages=('unicode','perplexity reference=good/ max_bits_per_byte=4.0',{names}"
    keys = (
        "prepare.stages.perplexity.reference=good/",
        "prepare.stages.perplexity.max_bits_per_byte=4.0",
        f"prepare.sources.web.stages=('unicode','perplexity',{names}",
    )
    for overrides in ((line,), keys):
        assert run(corpus, tmp_path / "d", *overrides).manifest == manifest
        with pytest.raises(ConfigError, match=r"stage perplexity was removed .* put the stage `function` in its place"):
            run(corpus, tmp_path / "new", *overrides)
    assert not (tmp_path / "new").exists()
    with pytest.raises(ConfigError, match=r"min_bits_per_byte=0\.1"):
        run(corpus, tmp_path / "d", line.replace("max_bits", "min_bits_per_byte=0.1 max_bits"))
    with pytest.raises(ConfigError, match="no setting 'model_file=x'; did you mean 'model'"):
        run(corpus, tmp_path / "d", line.replace("max_bits", "model_file=x max_bits"))


def test_a_config_file_may_set_keys_of_a_stage_that_went(corpus, tmp_path):
    text = (corpus / "config.py").read_text()
    (tmp_path / "config.py").write_text(
        text.replace("    return c", "    c.prepare.stages.perplexity.chars = 9\n    return c")
    )
    assert config_files.load(str(tmp_path / "config.py")).prepare.stages.perplexity.chars == 9
    assert "perplexity" not in config_files.load(str(corpus / "config.py")).prepare.stages


def test_documents_of_another_recipe_are_not_taken_for_ones_own(corpus, done, tmp_path, monkeypatch):
    """Stopped after its documents were in place, then another recipe the same, then the first again."""

    def stop(*args):
        raise KeyboardInterrupt

    original = files.write_atomically
    for overrides in ((), ("prepare.sources.web.stages=('exact',)",)):
        monkeypatch.setattr(files, "write_atomically", stop)
        with pytest.raises(KeyboardInterrupt):
            run(corpus, tmp_path, *overrides)
    monkeypatch.setattr(files, "write_atomically", original)
    assert run(corpus, tmp_path).sha256 == done.sha256
    found = [d for path in documents.find(tmp_path)["web"] for d in documents.read_documents(path)]
    assert len(found) == 61
    assert not any("@mail-" in document.text for document in found)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("prepare.sources.web.stages=('exact','pii')", "exact, near, lines come last"),
        ("prepare.sources.web.stages=('pi',)", "no stage 'pi'; did you mean 'pii'"),
        ("prepare.sources.web.stages=('pii','pii')", "pii is listed twice"),
        ("prepare.sources.web.stages=('pii kind=2',)", "no setting 'kind=2'; did you mean 'kinds'"),
        ("prepare.sources.web.stages=('near bands=2',)", "set config.prepare.stages.near.KEY"),
        ("prepare.sources.web.path='nowhere'", "nowhere"),
        ("prepare.sources.web.format='txet'", "choose one of auto, .*; did you mean 'text'"),
        ("prepare.stages.near.threshold=7.0", "near.threshold=7.0 must be in 0 to 1"),
        ("prepare.stages.near.bands=0", "near.bands=0 must be at least 1"),
        (
            "prepare.sources.web.stages=('gopher_quality min_words=-5',)",
            "gopher_quality.min_words=-5 must be at least 0",
        ),
        ("prepare.sources.web.stages=('c4 min_sentences=x',)", "expected int"),
        ("prepare.sources.web.stages=('gopher_quality min_words=x',)", "expected int"),
        ("prepare.sources.web.stages=('gopher_quality max_words=10',)", "min_words=50 is above max_words=10"),
        ("data.dir=/proc/nothing", "data.dir=/proc/nothing can't be made"),
        ("prepare.engine_options=('partition',)", "'partition' must be NAME=VALUE"),
    ],
)
def test_bad_settings_are_refused_in_one_line(corpus, tmp_path, override, message):
    with pytest.raises(ConfigError, match=message) as error:
        run(corpus, tmp_path, override)
    assert "\n" not in str(error.value)


def test_a_failing_task_is_named_and_what_is_done_stays(corpus, done, tmp_path, monkeypatch):
    c = load(corpus, tmp_path)
    units = prepare.make_plan(c.prepare, c.data, c.engine)[1]
    calls = []
    original = engine.run

    def until_near(engine, settings, folder, phase, function, tasks):
        calls.append(phase)
        if phase == "near" and calls.count("near") == 1:
            next((folder / "pairs").glob("*.parquet")).write_bytes(b"garbage")
        original(engine, settings, folder, phase, function, tasks)

    monkeypatch.setattr(engine, "run", until_near)
    with pytest.raises(RunError, match=r"near: task 0 of 1 failed \(.*its log is .*task_00000.log"):
        run(corpus, tmp_path)
    assert not (tmp_path / prepare.MANIFEST).exists()
    work = next((tmp_path / "work").iterdir())
    cleaned = sorted((work / "clean").iterdir())
    assert len(cleaned) == len(units)
    times = [path.stat().st_mtime_ns for path in cleaned]
    broken = next(path for path in (work / "pairs").glob("*.parquet") if path.read_bytes() == b"garbage")
    (work / "tasks" / "pairs" / "completions" / f"{int(broken.stem):05d}").unlink()
    seen = []
    monkeypatch.setattr(prepare, "_conclude", lambda *rest: seen.append([p.stat().st_mtime_ns for p in cleaned]))
    with pytest.raises(ConfigError, match=r"no prepared\.json"):
        run(corpus, tmp_path)
    assert seen == [times]


def command(corpus, out, *overrides) -> list[str]:
    words = [f"--config={corpus / 'config.py'}", f"--config.data.dir={out}", *(f"--config.{o}" for o in overrides)]
    return [sys.executable, "-m", "jaxlm.cli.cli", "prepare", *words]


def test_empty_folders_of_a_first_run_that_was_killed_at_once_are_no_obstacle(corpus, tmp_path):
    (tmp_path / "work" / "0123456789ab" / "tasks").mkdir(parents=True)
    with pytest.raises(ConfigError, match="no such file or folder"):  # past the check of who made it
        run(corpus, tmp_path, "prepare.sources.web.path='nowhere'")
    (tmp_path / "work" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="jaxlm did not make it"):
        run(corpus, tmp_path)


@pytest.mark.faults
@pytest.mark.parametrize("phase", ["clean", "exact", "pairs", "near", "lines", "finish"])
def test_killed_in_any_phase_and_run_again_it_gives_the_same(corpus, done, tmp_path, phase):
    process = subprocess.Popen(
        command(corpus, tmp_path), start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob(f"work/*/tasks/{phase}/logs/*")) and time.monotonic() < deadline:
        assert process.poll() is None, "it finished before it could be killed"
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / prepare.MANIFEST).exists()
    assert run(corpus, tmp_path).sha256 == done.sha256


def test_it_tells_how_far_it_is(corpus, tmp_path, monkeypatch, capsys):
    for module, name in ((console, "WORKING_S"), (console, "AGAIN_S"), (screen, "TICK_S"), (engine, "_LOOK_S")):
        monkeypatch.setattr(module, name, 0.02)
    read = pipeline.read_unit

    def slowly(*args):
        yield from read(*args)
        time.sleep(0.2)  # ten looks at how many of the others are done

    monkeypatch.setattr(pipeline, "read_unit", slowly)
    c = load(corpus, tmp_path, "prepare.workers=1")
    prepare.prepare(c.prepare, c.data, c.engine)
    said = capsys.readouterr().err.splitlines()
    assert "clean ..." in said
    assert any(
        re.fullmatch(r"clean: [1-5] of 6 tasks, \d\d%, [\d,]+ documents, 0m\d\ds, 0m\d\ds left", line) for line in said
    ), said


def test_a_document_that_others_repeat_for_the_most_part_goes(tmp_path):
    shared = [text(f"p{i}", 60) for i in range(3)]
    rows = {
        "old": ["\n\n".join([*shared, text("own", 12)]), text("alone")],
        "curated": ["\n\n".join([*shared, text("more", 80)])],
    }
    lines = ["from jaxlm.configs import base", "def get_config():", "  c = base.get_config()"]
    for priority, (name, texts) in enumerate(rows.items()):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
        lines.append(
            f"  c.prepare.sources.{name} = base.source({str(tmp_path / name)!r} + '.jsonl', ('lines',), priority={priority})"
        )
    (tmp_path / "config.py").write_text("\n".join([*lines, "  return c"]))
    stays = run(tmp_path, tmp_path / "stays").manifest["sources"]
    assert stays["old"]["kept"]["documents"] == 2  # what is left of it is a text
    sources = run(tmp_path, tmp_path / "d", "prepare.stages.lines.max_removed=0.5").manifest["sources"]
    assert sources["old"]["stages"][-1]["removed"] == {"mostly repeated": 1}
    assert sources["old"]["kept"]["documents"] == sources["curated"]["kept"]["documents"] == 1


def test_two_at_once_are_refused(corpus, tmp_path):
    with (
        files.lock(tmp_path, "is writing", "config.data.dir"),
        pytest.raises(ConfigError, match="another process is writing"),
    ):
        run(corpus, tmp_path)


@pytest.mark.faults
def test_workers_end_with_a_killed_driver_and_the_next_run_gives_the_same(corpus, done, tmp_path):
    import psutil

    process = subprocess.Popen(command(corpus, tmp_path, "prepare.workers=2"), stderr=subprocess.DEVNULL)
    workers, deadline = [], time.monotonic() + 120
    while not list(tmp_path.glob("work/*/tasks/clean/logs/*")) and time.monotonic() < deadline:
        time.sleep(0.005)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    assert workers
    assert not psutil.wait_procs(workers, timeout=30)[1]
    assert run(corpus, tmp_path).sha256 == done.sha256


def test_stopped_while_it_concludes_and_run_again_it_gives_the_same(corpus, done, tmp_path, monkeypatch):
    original = prepare._merge_removed

    def half(*args):
        original(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare, "_merge_removed", half)
    with pytest.raises(KeyboardInterrupt):
        run(corpus, tmp_path)
    monkeypatch.undo()
    assert run(corpus, tmp_path).sha256 == done.sha256
    for path in (done.path / "removed").iterdir():
        assert (tmp_path / "removed" / path.name).read_bytes() == path.read_bytes()


def test_what_a_stage_half_built_is_built_anew(corpus, tmp_path, monkeypatch):
    (tmp_path / "bench.jsonl").write_text(
        json.dumps({"question": "How many lamps does the old keeper of the harbour light?"})
    )
    stage = f"prepare.sources.web.stages=('decontaminate paths={tmp_path}/bench.jsonl','exact')"
    whole = run(corpus, tmp_path / "whole", stage)
    write = decontaminate.np.save
    calls = []

    def stop_at_the_third(path, array):
        calls.append(path)
        if len(calls) == 3:
            raise KeyboardInterrupt
        write(path, array)

    monkeypatch.setattr(decontaminate.np, "save", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        run(corpus, tmp_path / "d", stage)
    monkeypatch.undo()
    assert run(corpus, tmp_path / "d", stage).sha256 == whole.sha256


@pytest.mark.faults
def test_a_killed_worker_is_noticed(corpus, tmp_path):
    """As by the system when memory is out: the run ends with a line instead of waiting for ever."""
    import psutil

    process = subprocess.Popen(command(corpus, tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    killed = False
    while not killed and time.monotonic() < deadline and process.poll() is None:
        if list(tmp_path.glob("work/*/tasks/clean/logs/*")):
            for child in psutil.Process(process.pid).children(recursive=True):
                if "spawn_main" in " ".join(child.cmdline()):
                    child.kill()
                    killed = True
        time.sleep(0.005)
    _, said = process.communicate(timeout=120)
    assert killed
    assert process.returncode == 1
    assert "clean: task" in said
    assert "run the same command again" in said


@pytest.mark.engines
def test_ray_gives_the_same(corpus, done, tmp_path):
    pytest.importorskip("ray", reason="pip install -e '.[ray]'")
    words = command(corpus, tmp_path, "engine=ray", "prepare.workers=2", "prepare.engine_options=('num_cpus=2',)")
    subprocess.run(words, check=True, timeout=400)
    assert prepare.open_prepared(tmp_path).sha256 == done.sha256


SBATCH = """#!/usr/bin/env python3
# A Slurm of one machine: runs the array of the script, waits, fails if a task fails.
import os, re, subprocess, sys
if "--version" in sys.argv:
    sys.exit(print("slurm 23.11 (stub)"))
script = open(sys.argv[-1]).read()
assert "#SBATCH --wait" in script
last = int(re.search(r"--array=0-(\\d+)", script)[1])
failed = 0
for task in range(last + 1):
    env = os.environ | {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_NODELIST": "localhost", "RUN_OFFSET": "0"}
    failed |= subprocess.run(["bash"], input=script, text=True, env=env, stdout=subprocess.DEVNULL).returncode
print("Submitted batch job 17")
sys.exit(bool(failed))
"""


@pytest.mark.engines
def test_slurm_gives_the_same(corpus, done, tmp_path):
    programs = tmp_path / "bin"
    programs.mkdir()
    scripts = {"sbatch": SBATCH, "scontrol": "#!/bin/sh\necho localhost\n", "srun": '#!/bin/sh\nshift 3\nexec "$@"\n'}
    for name, content in scripts.items():
        (programs / name).write_text(content)
        (programs / name).chmod(0o755)
    path = os.pathsep.join([str(programs), str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
    words = command(
        corpus,
        tmp_path / "d",
        "engine=slurm",
        "prepare.workers=400",
        "prepare.engine_options=('partition=cpu','time=1:00:00')",
    )
    subprocess.run(words, check=True, timeout=400, env=os.environ | {"PATH": path})
    assert prepare.open_prepared(tmp_path / "d").sha256 == done.sha256


def test_engines_that_are_not_there_are_named(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="engine=slurm needs sbatch"):
        run(corpus, tmp_path / "d", "engine=slurm")
