"""The parts of a mismatch report: how far sources are from one another and from a target, and what to try."""

import dataclasses
import typing

TARGET = "target"  # its name among the sources


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two sources `a` and `b`, or a source and the target (then `b` is "target").

    Attributes:
      js_words, js_bigrams: Jensen-Shannon divergence in bits, from 0 (the same) to 1 (nothing in common).
      floor_words, floor_bigrams: the divergence that chance alone causes: that between two halves of one source, on
        samples of the same size, as a mean over both sources.
      auc: the area under the ROC curve of a classifier that tells passages of `a` from those of `b`, cross-validated by
        document; None if there are too few documents.
      telling_a, telling_b: the words and pairs of words by which the classifier recognises `a` and `b`.
    """

    a: str
    b: str
    js_words: float
    floor_words: float
    js_bigrams: float
    floor_bigrams: float
    auc: float | None
    telling_a: list[str]
    telling_b: list[str]

    @property
    def distance(self) -> float:
        """Returns the divergence of words in bits, minus the part that chance causes; at least 0."""
        return max(0.0, self.js_words - self.floor_words)


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Two mixtures of the sources: the one in use, and the one nearest to the target.

    Attributes:
      now, nearest: source -> its share of the words.
      js_now, js_nearest: the divergence in bits of each mixture from the target.
    """

    now: dict[str, float]
    nearest: dict[str, float]
    js_now: float
    js_nearest: float


@dataclasses.dataclass(frozen=True)
class Advice:
    """What to do with a source in a pilot.

    Attributes:
      action: keep, raise, lower or drop; try if there is no target.
      sentence: the reason, for users.
    """

    action: str
    sentence: str


@dataclasses.dataclass(frozen=True)
class Report:
    """The results of `mismatch.compare`.

    Attributes:
      sources: source's name (or "target") -> documents, bytes, sampled_words, length, readability, formats; see
        `textstats`.
      pairs: every pair of sources, then every source with the target.
      mixture: the mixtures compared with the target; None if there is no target.
      advice: source -> what to do with it.
    """

    sources: dict[str, dict[str, typing.Any]]
    pairs: list[Pair]
    mixture: Mixture | None
    advice: dict[str, Advice]

    def to_dict(self) -> dict[str, typing.Any]:
        """Returns the report as JSON values, with the `distance` of each pair."""
        found = dataclasses.asdict(self)
        for pair, row in zip(self.pairs, found["pairs"], strict=True):
            row["distance"] = pair.distance
        return found
