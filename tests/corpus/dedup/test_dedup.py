"""Exact and near duplicates and repeated lines over several tasks, with planted copies; and the hashes they are found by."""

import random
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow.parquet as pq
import pytest

from jaxlm.corpus.dedup import lines, near, signatures
from jaxlm.corpus.dedup.near import Signer
from jaxlm.corpus.dedup.sql import connect
from jaxlm.corpus.pipeline import make_folders
from jaxlm.corpus.stage import Document

NEAR = {"threshold": 0.6, "ngram": 5, "bands": 20, "rows": 5}
LINES = {"min_documents": 3, "min_share": 0.3, "min_chars": 20, "min_paragraph_chars": 200}
WORDS = [f"{a}{b}" for a in "bcdfghjklm" for b in ("an", "or", "ith", "ey", "um", "all", "ost", "ide", "ern", "ock")]


def text(seed, n=200):
    return " ".join(random.Random(f"t{seed}").choices(WORDS, k=n))


def near_copy(base: str, jaccard: float, seed: int) -> str:
    """A text whose 5-word shingles have about this similarity with `base`: its tail is replaced."""
    words = base.split()
    keep = round(2 * jaccard / (1 + jaccard) * len(words))
    return " ".join([*words[:keep], *random.Random(seed).choices(WORDS, k=len(words) - keep)])


QUERY = """
import pathlib, sys
from jaxlm.corpus.dedup.sql import connect
try:
    with connect(pathlib.Path(sys.argv[1]), 0.5, 1) as connection:
        print("begins", flush=True)
        connection.execute("SELECT sum(a.range * b.range) FROM range(1000000) a, range(100000) b").fetchall()
except KeyboardInterrupt:
    print("interrupted")
"""


def test_ctrl_c_in_a_query_is_told_as_such(tmp_path):
    with subprocess.Popen([sys.executable, "-c", QUERY, tmp_path], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "begins\n"
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=20)[0] == "interrupted\n"
        finally:
            process.kill()


PARTS = 3  # tasks, by hash


def deduplicate(folder, tasks, near_settings=NEAR, priorities=None):
    """`tasks`: lists of (id, text). Returns ({id: keeper} by stage, {id: number of keys that go})."""
    make_folders(folder)
    for task, documents in enumerate(tasks):
        priority = priorities[task] if priorities else 0
        signer = Signer(folder, task, priority, {"exact": {}, "near": near_settings, "lines": LINES})
        for doc_id, body in documents:
            signer.add(Document(body, doc_id, {"source": "s"}))
        signer.finish()
    with connect(folder, 0.25, 2) as connection:
        for part in range(PARTS):
            near.find_copies(connection, folder, part, PARTS)
        for band in range(near_settings["bands"]):
            near.find_pairs(connection, folder, band, near_settings["threshold"])
        near.resolve(connection, folder)
        for part in range(PARTS):
            lines.find(connection, folder, LINES, part, PARTS)
    names = {task << 32 | row: doc[0] for task, documents in enumerate(tasks) for row, doc in enumerate(documents)}
    gone = {}
    for stage in ("exact", "near"):
        table = pq.read_table(folder / stage).to_pylist()
        gone[stage] = {names[row["doc"]]: row["keeper_id"] for row in table}
    counts = {}
    for row in pq.read_table(folder / "repeats").to_pylist():
        counts[names[row["doc"]]] = counts.get(names[row["doc"]], 0) + 1
    return gone, counts


def test_exact_copies_go_whatever_their_case_and_spacing(tmp_path):
    a, b = text(1), text(2)
    gone, _ = deduplicate(tmp_path / "d", [[("a1", a), ("b", b)], [("a2", a.upper()), ("a3", a.replace(" ", "\n"))]])
    assert len(gone["exact"]) == 2
    assert set(gone["exact"]) < {"a1", "a2", "a3"}
    assert not gone["near"]


def test_copies_are_seen_across_batches(tmp_path):
    """With one group over several batches, and groups that end where a batch does."""
    gone, _ = deduplicate(tmp_path / "d", [[(f"{name}{i}", f"the text {name}") for i in range(1500)] for name in "abc"])
    keepers = set(gone["exact"].values())
    assert sorted(keeper[0] for keeper in keepers) == ["a", "b", "c"]
    assert len(gone["exact"]) == 3 * 1499
    assert not keepers & set(gone["exact"])


def test_recall_and_precision_by_similarity(tmp_path):
    """Issue: recall >= .90 at J = .8 and >= .80 at .7; at most .05 removed below .5."""
    n = 150
    for jaccard, low, high in ((0.8, 0.90, 1), (0.7, 0.80, 1), (0.45, 0, 0.05)):
        bases = [(f"base{i}", text(i)) for i in range(n)]
        copies = [(f"copy{i}", near_copy(base, jaccard, i)) for i, (_, base) in enumerate(bases)]
        gone, _ = deduplicate(tmp_path / str(jaccard), [bases, copies])
        assert low <= len(gone["near"]) / n <= high


def test_the_curated_copy_survives(tmp_path):
    base = text(1)
    longer = base + " and " + text(2, 15)
    gone, _ = deduplicate(tmp_path / "d", [[("web", longer)], [("curated", base)]], priorities=[0, 5])
    assert gone["near"] == {"web": "curated"}


def test_a_chain_loses_only_what_resembles_a_document_that_stays(tmp_path):
    words = text(7, 300).split()
    a, b, c = (" ".join(words[start : start + 200]) for start in (0, 40, 80))  # J(a,b) = J(b,c) = .66, J(a,c) = .42
    for order in ([("a", a), ("b", b), ("c", c)], [("c", c), ("b", b), ("a", a)]):
        tasks, priorities = [[item] for item in order], [{"a": 2, "b": 1, "c": 0}[name] for name, _ in order]
        gone, _ = deduplicate(tmp_path / order[0][0], tasks, priorities=priorities)
        assert gone["near"] == {"b": "a"}


def test_the_order_of_shards_does_not_matter(tmp_path):
    rng = random.Random(0)
    documents = []
    for i in range(40):
        base = text(f"o{i}", rng.randint(60, 200))
        documents += [(f"{i}.{k}", near_copy(base, rng.choice([0.95, 0.8, 0.65]), 100 * i + k)) for k in range(4)]
    kept = []
    for seed in range(2):
        random.Random(seed).shuffle(documents)
        tasks = [documents[:50], documents[50:60], documents[60:]]
        gone, _ = deduplicate(tmp_path / str(seed), tasks)
        kept.append({doc_id for doc_id, _ in documents} - set(gone["near"]) - set(gone["exact"]))
    assert kept[0] == kept[1]
    assert 40 <= len(kept[0]) < 120


def test_copies_beyond_the_leaders_of_a_bucket_are_found_among_their_neighbours():
    rng = np.random.default_rng(0)
    unlike = [np.sort(rng.integers(0, 2**32, 100, np.uint32)) for _ in range(near.LEADERS + 8)]

    class Held:
        def read(self, doc: int, start: int, length: int) -> np.ndarray:
            return unlike[doc // 2]  # each document and, next in rank, its copy

    bucket = np.zeros((2 * len(unlike), 4), np.uint64)
    bucket[:, 0] = np.arange(len(bucket))
    pairs = set(near._similar_pairs(bucket, 0.6, Held()))
    assert pairs == {(2 * i, 2 * i + 1) for i in range(len(unlike))}


def test_pairs_lie_in_few_groups(tmp_path):
    """A group a bucket cost two kilobytes a pair in memory when they were read."""
    bases = [(f"base{i}", text(i)) for i in range(60)]
    copies = [(f"copy{i}", near_copy(base, 0.9, i)) for i, (_, base) in enumerate(bases)]
    deduplicate(tmp_path / "d", [bases, copies])
    paths = sorted((tmp_path / "d/pairs").iterdir())
    assert paths
    for path in paths:
        about = pq.read_metadata(path)
        assert about.num_rows > 10
        assert about.num_row_groups == 1


def test_pages_of_one_template_are_told_apart_and_their_copies_found(tmp_path):
    """More pages than a bucket compares pair by pair share most bands; each has a near copy of its own."""
    template = text("template", 150)
    pages = [(f"p{i}", f"{template} {text(f'own{i}', 120)}") for i in range(80)]
    copies = [(f"c{i}", page.replace(page.split()[-3], "changed")) for i, (_, page) in enumerate(pages)]
    gone, _ = deduplicate(tmp_path / "d", [pages, copies])
    assert len(gone["near"]) == 80
    assert {name[1:] for name in gone["near"]} == {str(i) for i in range(80)}


def test_short_documents_and_tables_of_numbers_are_not_confused(tmp_path):
    tables = [(f"t{i}", " ".join(str(x) for x in random.Random(i).choices(range(10_000), k=100))) for i in range(20)]
    short = [("s1", "page not found"), ("s2", "page not there"), ("s3", "ok"), ("s4", "..."), ("s5", "!!!")]
    gone, _ = deduplicate(tmp_path / "d", [tables, short])
    assert not gone["near"]
    assert not gone["exact"]


def test_boilerplate_lines_go_from_all_and_copied_paragraphs_stay_once(tmp_path):
    notice = "Copyright by the authors of this site, all rights reserved."
    paragraph = text("p", 60)
    documents = [(f"d{i}", f"{text(i, 30)}\n{notice}\nshort line\n```\n{notice}\n```\n") for i in range(4)]
    documents += [(f"p{i}", f"{text(50 + i, 30)}\n\n{paragraph}") for i in range(2)]
    folder = tmp_path / "d"
    gone, counts = deduplicate(folder, [documents[:3], documents[3:]])
    assert not gone["exact"]
    assert not gone["near"]
    assert {doc_id: count for doc_id, count in counts.items() if doc_id[0] == "d"} == {f"d{i}": 1 for i in range(4)}
    assert sum(count for doc_id, count in counts.items() if doc_id[0] == "p") == 1
    going = {row["key"] for row in pq.read_table(folder / "repeats").to_pylist()}
    text_left, count = lines.remove(documents[0][1], "s", "", LINES, going, headings=True)
    assert count == 1
    assert text_left.count(notice) == 1  # the one in the fence
    assert "short line" in text_left


def test_code_has_no_boilerplate_and_fences_are_paired(tmp_path):
    line = "from __future__ import annotations"
    make_folders(tmp_path)
    signer = Signer(tmp_path, 0, 0, {"lines": LINES})
    for i in range(4):
        signer.add(Document(f"{line}\n{text(i)}", f"{i}.py", {"source": "s", "format": "code"}))
    signer.finish()
    assert not pq.read_table(tmp_path / "lines" / "000000.parquet").num_rows
    page = f"````\n```\n{line}\n```\n{line}\n````\n~~~ sh\n{line}\n~~~\n{line}"
    ((key, _),) = lines.keys(page, "s", "", LINES)
    assert lines.remove(page, "s", "", LINES, {key}, headings=False) == (page.rpartition("\n")[0], 1)


def test_what_a_removed_line_leaves_behind_goes_too():
    gone = "The footer of this site, all rights reserved."
    page = f"# Title\n\nText.\n\n## Legal\n\n{gone}\n\n## More\n\nMore text.\n{gone}\n\n\nEnd.\n\n## Last\n### Sub\n{gone}\n"
    ((key, _),) = (found for found in lines.keys(page, "s", "", LINES))
    left, count = lines.remove(page, "s", "", LINES, {key}, headings=True)
    assert count == 6  # three lines and three headings
    assert left == "# Title\n\nText.\n\n## More\n\nMore text.\n\nEnd."
    empty = "# A\n\n## B\n\n# C\n\nText."
    assert lines.remove(empty, "s", "", LINES, {key}, headings=True) == (
        empty,
        0,
    )  # headings that were empty before stay
    shell = f"As root:\n\n# apt-get install nginx-full\n\n{gone}"
    assert lines.remove(shell, "s", "", LINES, {key}, headings=False) == ("As root:\n\n# apt-get install nginx-full", 1)
    assert (
        lines.remove(f"# A\n\n{gone}\n\n## B\n\nText.", "s", "", LINES, {key}, headings=True)[0]
        == "# A\n\n## B\n\nText."
    )


def test_a_line_is_as_long_at_the_end_as_elsewhere():
    """In folded case: ß is two letters then."""
    line = "Straßenordnung 2024"
    settings = LINES | {"min_chars": len(line) + 1}
    assert list(lines.keys(line, "s", "", settings)) == list(lines.keys(f"{line}\n", "s", "", settings)) != []


def test_a_line_of_few_pages_of_a_large_site_stays(tmp_path):
    line = "check_finite : bool, optional, whether to check the input"
    pages = [(f"d{i}", f"{text(i, 30)}\n{line if i < 5 else text(100 + i, 9)}") for i in range(20)]
    _, counts = deduplicate(tmp_path / "d", [pages])
    assert not counts


def test_lines_of_removed_duplicates_do_not_count(tmp_path):
    line = "This very line stands in a document and its copies only."
    body = text("x", 150) + "\n" + line
    _, counts = deduplicate(tmp_path / "d", [[(f"c{i}", body) for i in range(5)]])
    assert not counts


def test_the_recall_test_can_fail(tmp_path):
    settings = NEAR | {"bands": 1, "rows": 40}  # hardly any candidates
    bases = [(f"base{i}", text(i)) for i in range(30)]
    copies = [(f"copy{i}", near_copy(base, 0.8, i)) for i, (_, base) in enumerate(bases)]
    gone, _ = deduplicate(tmp_path / "d", [bases, copies], settings)
    assert len(gone["near"]) < 0.5 * 30


NUMBERED = [f"w{i}" for i in range(5000)]


def numbered(seed: int, n: int = 400) -> str:
    return " ".join(random.Random(seed).choices(NUMBERED, k=n))


def jaccard(a: str, b: str, n: int = 5) -> float:
    def grams(t: str) -> set[tuple[str, ...]]:
        words = re.findall(r"\w+", t.casefold())
        return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}

    return len(grams(a) & grams(b)) / len(grams(a) | grams(b))


def edited(base: str, share: float, seed: int) -> str:
    """`base` with a run of its words replaced, so that the rest keeps its shingles."""
    words = base.split()
    cut = int(len(words) * share)
    return " ".join([*words[: len(words) - cut], *random.Random(seed).choices(NUMBERED, k=cut)])


@pytest.mark.parametrize(
    "line",
    [
        "One, two -- three's (4.5)", "tab\tand\nnewline", "Ünïcode façade naïve", "a" * 3000 + " b", "x_y z", "", "...",
        "é",
    ],
)  # fmt: skip
def test_words_are_those_of_a_regular_expression(line):
    hashes = signatures.word_hashes(line)
    words = re.findall(r"[^\W_]+", line.casefold())
    assert len(hashes) == len(words)
    assert len(set(hashes.tolist())) == len(set(words))


def test_scripts_without_spaces_count_by_character():
    assert len(signatures.word_hashes("机器学习 is 学习")) == 7


def test_permuted_letters_and_digits_differ():
    assert len({signatures.word_hashes(w)[0].item() for w in ("abc", "acb", "bca", "12", "21", "1", "11")}) == 7


def test_normalised_hash_ignores_spacing_and_case_only():
    assert signatures.normalised_hash("A  b\n c") == signatures.normalised_hash("a b c ")
    assert signatures.normalised_hash("a b c") != signatures.normalised_hash("a b, c")


@pytest.mark.parametrize("n", [300, 3000])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.6])
def test_similarity_of_sketches_is_that_of_the_texts(n, share):
    a = numbered(1, n)
    b = edited(a, share, 2)
    sketches = [signatures.sketch(signatures.shingles(signatures.word_hashes(t), 5)) for t in (a, b)]
    tolerance = 1e-9 if n < signatures.SKETCH else 0.06  # three standard deviations of a sample of 512
    assert signatures.similarity(*sketches) == pytest.approx(jaccard(a, b), abs=tolerance)
