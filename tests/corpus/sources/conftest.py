"""Reads a source the way tasks do: units, then each unit."""

import dataclasses
import pickle

import pytest

from jaxlm.corpus.sources.base import SourceSpec, SourceStats
from jaxlm.corpus.sources.units import read_unit, split_source


@pytest.fixture
def read_source():
    """`(documents, stats)` of a path; keys of SourceSpec may be given."""

    def read(path, task_bytes=1 << 26, **keys):
        spec = make_spec(path, **keys)
        stats = SourceStats()
        made = split_source(spec, task_bytes)
        assert pickle.loads(pickle.dumps(made)) == made
        documents = [document for unit in made for document in read_unit(unit, spec, stats)]
        assert stats.documents == len(documents)
        assert len({document.id for document in documents}) == len(documents)
        return documents, stats

    return read


def make_spec(path, **keys):
    spec = SourceSpec("web", str(path))
    return dataclasses.replace(spec, **keys)


@pytest.fixture
def spec():
    """Makes a SourceSpec."""
    return make_spec
