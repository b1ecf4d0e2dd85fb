"""Each test closes the recorders that it opens: an open one makes later messages of the process scarce."""

import pytest

from jaxlm.host import screen


@pytest.fixture(autouse=True)
def no_live_line_is_left():
    yield
    assert not screen.standing()
