"""A place for each file of faults, and an end to whatever a test leaves running."""

import pytest
from faults.harness import Place


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A place of this file's own. Compiled programs are shared with the other files."""
    made = Place(tmp_path_factory.mktemp("place"), tmp_path_factory.getbasetemp().parent / "compiled")
    yield made
    made.close()


@pytest.fixture(autouse=True)
def nothing_left(place):
    """Every test ends with no process left behind: neither the run's own, nor workers, nor children."""
    yield
    left = [process.cmdline() for process in place.left()]
    place.end_all()
    assert not left
