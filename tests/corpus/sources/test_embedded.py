"""The embedded corpus: deterministic, without duplicates, parsed rather than imported."""

import subprocess
import sys

import pytest

from jaxlm.config import ConfigError
from jaxlm.corpus.sources import embedded

CAP = 300_000


@pytest.mark.parametrize("name", embedded.NAMES)
def test_sources_are_sizeable_distinct_and_the_same_each_time(name):
    documents = list(embedded.iterate_embedded(name, CAP))
    assert documents == list(embedded.iterate_embedded(name, CAP))
    size = sum(len(text.encode()) for _, text in documents)
    assert 0.5 * CAP < size <= CAP
    assert len({doc_id for doc_id, _ in documents}) == len(documents)
    bodies = [" ".join(text.removeprefix(doc_id).split()) for doc_id, text in documents]
    assert len(set(bodies)) == len(bodies)
    assert not any("/tests/" in doc_id or ".tests." in doc_id for doc_id, _ in documents)


def test_each_source_is_what_it_says():
    prose = dict(embedded.iterate_embedded("prose", CAP * 3))
    assert any(doc_id.startswith("python-topic.") for doc_id in prose)
    assert "comparison" in prose["python-topic.comparisons"]
    math = list(embedded.iterate_embedded("math", CAP))
    assert {doc_id.split(".")[0] for doc_id, _ in math} == {"numpy", "scipy", "jax"}
    for doc_id, text in embedded.iterate_embedded("code", CAP):
        compile(text, doc_id, "exec", dont_inherit=True)


def test_nothing_scanned_is_imported():
    code = (
        "import sys; from jaxlm.corpus.sources import embedded\n"
        "before = set(sys.modules)\n"
        "list(embedded.iterate_embedded('math', 200_000)); list(embedded.iterate_embedded('prose', 200_000))\n"
        "new = {m.split('.')[0] for m in set(sys.modules) - before}\n"
        "assert not new & {'scipy', 'flax', 'optax', 'tensorflow_datasets', 'pyarrow', 'turtle', 'this'}, new\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_an_unknown_name_is_refused():
    with pytest.raises(ConfigError, match="no embedded source 'poems'; there are embedded:prose, embedded:math"):
        list(embedded.iterate_embedded("poems"))
