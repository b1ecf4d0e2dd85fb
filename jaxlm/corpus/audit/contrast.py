"""The text that the audit compares sources with: the target, or for a single source general prose."""

import collections
import pathlib
from collections.abc import Iterator

from jaxlm.corpus.audit.counts import Counts, scan
from jaxlm.corpus.sources.base import SourceSpec, SourceStats
from jaxlm.corpus.sources.embedded import iterate_embedded
from jaxlm.corpus.sources.units import read_unit, split_source
from jaxlm.corpus.stages import registry

_TARGET_BYTES = 8_000_000
_GENERAL_BYTES = 1_000_000
_FEW_BYTES = 100_000  # of a source tell nothing about its words


def counts(sources: list[Counts], target: str, html: dict) -> Counts | None:
    """Returns the counts of the text to compare the sources with; None if they have each other.

    Args:
      sources: the counts of the sources.
      target: `prepare.target`.
      html: the settings of the stage that strips markup from the target.
    """
    if target:
        return scan("target", target_texts(target, _TARGET_BYTES, html))
    if len(sources) != 1 or sources[0].bytes < _FEW_BYTES:
        return None
    return scan("general prose", iterate_embedded("prose", min(_GENERAL_BYTES, sources[0].bytes)))


def target_texts(path: str, limit: int, html: dict) -> Iterator[tuple[str, str]]:
    """Yields (id, text) of about `limit` bytes of `prepare.target`, which may have any format that a source may have.

    `html` holds the settings of the stage that strips markup. Raises ConfigError if there is nothing at `path`.
    """
    spec = SourceSpec("target", path, max_bytes=limit)
    units = split_source(spec, max(1 << 20, limit))
    stage = registry.make(registry.StageSpec("html", html), pathlib.Path())

    def texts() -> Iterator[tuple[str, str]]:
        for unit in units:
            for document in read_unit(unit, spec, SourceStats()):
                if stage.apply(document, collections.Counter()) is None:
                    yield document.id, document.text

    return texts()
