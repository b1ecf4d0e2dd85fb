"""Hashes of texts: what counts as a word, shingles against plain Python, MinHash and sketches against true similarity."""

import random
import re

import numpy as np
import pytest

from jaxlm.corpus.dedup import signatures

WORDS = [f"w{i}" for i in range(5000)]


def text(seed: int, n: int = 400) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=n))


def jaccard(a: str, b: str, n: int = 5) -> float:
    def grams(t: str) -> set[tuple[str, ...]]:
        words = re.findall(r"\w+", t.casefold())
        return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}

    return len(grams(a) & grams(b)) / len(grams(a) | grams(b))


def edited(base: str, share: float, seed: int) -> str:
    """`base` with a run of its words replaced, so that the rest keeps its shingles."""
    words = base.split()
    cut = int(len(words) * share)
    return " ".join([*words[: len(words) - cut], *random.Random(seed).choices(WORDS, k=cut)])


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
    a = text(1, n)
    b = edited(a, share, 2)
    sketches = [signatures.sketch(signatures.shingles(signatures.word_hashes(t), 5)) for t in (a, b)]
    tolerance = 1e-9 if n < signatures.SKETCH else 0.06  # three standard deviations of a sample of 512
    assert signatures.similarity(*sketches) == pytest.approx(jaccard(a, b), abs=tolerance)


def test_bands_find_similar_texts_as_often_as_the_formula_says():
    hits, truth = 0, []
    for seed in range(150):
        a = text(seed)
        b = edited(a, 0.2, seed + 1000)
        truth.append(jaccard(a, b))
        bands = [signatures.band_hashes(signatures.shingles(signatures.word_hashes(t), 5), 8, 5) for t in (a, b)]
        hits += bool((bands[0] == bands[1]).any())
    expected = np.mean([1 - (1 - j**5) ** 8 for j in truth])
    assert hits / 150 == pytest.approx(expected, abs=0.12)
    assert 0.5 < expected < 0.95
