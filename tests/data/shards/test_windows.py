"""What is passed over: the sequence of batches is the plain one with the windows cut out."""

import itertools
import random

import numpy as np
import pytest

from jaxlm.config import ConfigError
from jaxlm.data.batches import loader, rows
from jaxlm.data.shards import mixture

MIXTURE = {"prose": 87, "math": 10, "code": 3}
OPTIONS = {"seed": 7, "seq_len": 24, "batch_size": 8}


def test_steps_train_on_the_batches_that_are_in_no_window():
    rng = random.Random(0)
    for _ in range(300):
        windows = [(first := rng.randint(1, 60), first + rng.randint(0, 9)) for _ in range(rng.randint(0, 8))]
        merged = mixture.merge_windows(windows)
        inside = {number for first, last in windows for number in range(first, last + 1)}
        assert inside == {number for first, last in merged for number in range(first, last + 1)}
        assert all(a[1] + 1 < b[0] for a, b in itertools.pairwise(merged))
        left = [number for number in range(1, 200) if number not in inside]
        assert [mixture.batch_number(step, merged) for step in range(1, 101)] == left[:100]
        before = [sum(other <= number for other in left) for number in range(150)]
        assert [mixture.step_of(number, merged) for number in range(150)] == before


@pytest.mark.parametrize("window", [(0, 3), (5, 4), (1,), (1, 2, 3), 5, "12", (1.5, 2), (True, 2), (1, 10**20), None])
def test_what_is_no_window_is_refused(window):
    with pytest.raises(ConfigError, match="is no window of batches to pass over"):
        mixture.merge_windows([window])


def take(order, n, start_step=0):
    with loader.TrainLoader(order, start_step=start_step, num_threads=3) as batches:
        return [batch["tokens"] for batch in itertools.islice(batches, n)]


def test_the_loader_and_trace_leave_the_windows_out_at_any_resume(data):
    plain, windows = rows.Rows(data, MIXTURE, **OPTIONS), [(3, 4), (9, 12), (5, 5), (1, 1)]
    order = rows.Rows(data, MIXTURE, **OPTIONS, passed_over=windows)
    whole = take(plain, 30)
    left = [batch for number, batch in enumerate(whole, 1) if number not in {1, 3, 4, 5, 9, 10, 11, 12}]
    assert order.batch_number(1) == 2
    assert order.fingerprint() == plain.fingerprint()
    for step in (0, 1, 4, 5, 21):
        got = take(order, 22 - step, step)
        assert all(map(np.array_equal, got, left[step:]))
    assert not all(map(np.array_equal, take(order, 20), whole))  # the comparison can fail
    coder = data.tokenizer()
    for step in (0, 1, 4, 20):
        assert rows.describe_batch(order, step) == rows.describe_batch(plain, order.batch_number(step + 1) - 1)
        text = "".join(document.text for document in rows.describe_batch(order, step)[0].documents)
        assert text.startswith(coder.decode(left[step][0]))


def test_a_window_behind_the_last_step_changes_no_step_before(data):
    before = rows.Rows(data, MIXTURE, **OPTIONS, passed_over=[(3, 4)])
    grown = rows.Rows(data, MIXTURE, **OPTIONS, passed_over=[(3, 4), (10, 12)])
    steps = range(1, 8)  # batches 1, 2, 5, ..., 9
    assert [before.batch_number(s) for s in steps] == [grown.batch_number(s) for s in steps]
    assert grown.batch_number(8) == 13
