"""From which source each row is: exact shares, two mixtures one after the other, windows that are passed over."""

import dataclasses
import fractions
import itertools
import random

import numpy as np
import pytest

from jaxlm import config
from jaxlm.config import ConfigError, SourceConfig, config_files
from jaxlm.data.batches import document_rows, loader
from jaxlm.data.shards import mixture
from jaxlm.data.shards import mixture as mixing
from jaxlm.step import optim


def worst_lag(order, shares):
    drawn = np.cumsum(order[:, None] == np.arange(len(shares)), axis=0)
    due = np.arange(1, len(order) + 1)[:, None] * np.array([float(s) for s in shares])
    return np.abs(drawn - due).max()


@pytest.mark.parametrize(
    "mixture", [{"a": 87, "b": 10, "c": 3}, {"a": 0.87, "b": 0.1, "c": 0.03}, {c: 1 for c in "abcdefg"}, {"a": 1}]
)
def test_every_prefix_of_the_mixture_is_within_one_row_of_exact(mixture):
    shares = tuple(mixing.normalise_mixture(mixture, sorted(mixture)).values())
    order = np.tile(mixing.mixture_cycle(shares), 50)
    assert worst_lag(order, shares) < 1
    # The check can fail: the same counts in blocks are far off.
    assert len(shares) == 1 or worst_lag(np.sort(order), shares) > 1


def test_weights_without_a_small_common_denominator_are_rounded_to_65536ths():
    """And a share of 0 is never drawn."""
    shares = tuple(mixing.normalise_mixture({"a": 1 / 3, "b": 1 / 7, "c": 1e-9}, "abc").values())
    order = mixing.mixture_cycle(shares)
    counts = np.bincount(order, minlength=3)
    zero = (*mixing.normalise_mixture({"a": 1 / 3, "b": 1 / 7}, "ab").values(), fractions.Fraction(0))
    assert np.bincount(mixing.mixture_cycle(zero), minlength=3)[2] == 0
    assert order.size == mixing.MAX_CYCLE
    assert counts.min() >= 1
    assert np.abs(counts / order.size - [float(s) for s in shares]).max() < 2 / mixing.MAX_CYCLE


ROUNDED = {  # weights, the source that is off, by its line
    "tiny": ({"a": 1.0, "b": 1e-6}, "b is drawn with a share of 1.53e-05, its weight is 1e-06"),
    "two tiny": ({"a": 1.0, "b": 1e-6, "c": 2e-6}, "1 more are off by over 1%"),
    "thirds": ({"a": 0.1234567, "b": 0.3333333, "c": 0.7}, ""),
    "exact": ({"a": 0.9, "b": 0.1}, ""),
}


@pytest.mark.parametrize(("weights", "says"), ROUNDED.values(), ids=ROUNDED)
def test_the_share_that_is_drawn_is_the_one_that_is_said(weights, says):
    """The draws of the run's own plan stay within one row of it, however many rows there are."""
    plan = document_rows.plan_rows(dict.fromkeys(weights, 10**9), weights, seed=0, seq_len=8, batch_size=4)
    drawn = mixing.drawn_mixture(weights, [*reversed(plan.names)])
    for n in (10, 100_000, 10**7, 10**9):
        counts = mixing.count_draws(plan.shares, n)
        assert all(abs(count - n * drawn[name]) < 1 for name, count in zip(plan.names, counts, strict=True))
        off = [abs(count - n * share) for share, count in zip(plan.shares, counts, strict=True)]
        raised = sum(share < 1 / 65536 for share in plan.shares)  # at the cost of the largest
        most = [1 + n / 65536 * (1 + raised * (share == max(plan.shares))) for share in plan.shares]
        assert all(rows_off <= bound for rows_off, bound in zip(off, most, strict=True))
    line = mixing.rounding(weights, plan.names)
    assert says in line
    assert bool(line) is bool(says)


def test_weights_are_those_of_the_config_and_no_other():
    listed = {"a": SourceConfig(path="", weight=3.0), "b": SourceConfig(path="", weight=0.5)}
    assert mixing.weights_of(listed, ["b", "a"]) == {"b": 0.5, "a": 3.0}
    assert mixing.weights_of(listed, ["a"]) == {"a": 3.0}
    assert mixing.weights_of({}, ["a", "c"]) == {"a": 1.0, "c": 1.0}
    with pytest.raises(ConfigError, match=r"the source 'c', but the config gives it no weight: add data\.sources\.c"):
        mixing.weights_of(listed, ["a", "c"])


def draws(p, steps):
    located = [p.locate(s, np.arange(p.batch_size)) for s in steps]
    return [np.concatenate(parts) for parts in zip(*located, strict=True)]


def two_mixtures(seq_len=16, batch_size=8, first=None, last=None, windows=(), **final):
    """Three sources of 100, 30 and 7 rows of 16 tokens; a final mixture, by default after batch 30 of 50."""
    tokens = {"prose": 16 * 100 + 1, "math": 16 * 30 + 5, "code": 16 * 7 + 16}
    given = mixing.Final(last or {"prose": 40, "math": 40, "code": 20}, **({"share": 0.4, "steps": 50} | final))
    sizes = {"seed": 3, "seq_len": seq_len, "batch_size": batch_size}
    first = first or {"prose": 87, "math": 10, "code": 3}
    return document_rows.plan_rows(tokens, first, **sizes, passed_over=mixing.merge_windows(windows), final=given)


def plain(p):
    """The same plan with the first mixture alone."""
    return dataclasses.replace(p, final_shares=(), final_begins=0)


def check_draws(p, steps):
    """Each source's draws, in the order of the batches, are its epochs one after the other: each row once in each."""
    source, epoch, row = draws(p, range(steps))
    for k, n in enumerate(p.row_counts):
        mine = source == k
        expected = np.arange(mine.sum()) // n
        assert np.array_equal(epoch[mine], expected), p.names[k]
        for e in range(int(mine.sum()) // n):
            assert np.array_equal(np.sort(row[mine][e * n : (e + 1) * n]), np.arange(n)), (p.names[k], e)
        rest = row[mine][int(mine.sum()) // n * n :]
        assert len(set(rest.tolist())) == rest.size
    return [int((source == k).sum()) / n for k, n in enumerate(p.row_counts)]


@pytest.mark.parametrize(
    ("seq_len", "batch_size", "first", "last"),
    [
        (5, 7, None, None),
        (16, 8, {"prose": 1, "math": 0}, {"prose": 1, "math": 2, "code": 1}),  # two appear
        (16, 7, {"prose": 1, "math": 1, "code": 1}, {"code": 1}),  # two fall to 0
        (16, 8, {"prose": 1}, {"math": 1}),  # nothing in common
        (5, 8, {"prose": 1 / 3, "math": 1 / 7, "code": 1e-3}, {"prose": 0.2, "math": 1 / 9, "code": 0.1}),  # rounded
    ],
)
def test_over_the_switch_no_row_comes_twice_in_an_epoch_and_none_is_left_out(seq_len, batch_size, first, last):
    p = two_mixtures(seq_len, batch_size, first, last)
    times = check_draws(p, 300)
    assert max(times) > 2
    # The check can fail: draws that begin anew in the final mixture come twice.
    anew = dataclasses.replace(plain(p), shares=p.final_shares)
    source, epoch, row = draws(plain(p), range(30))
    again = draws(anew, range(30))
    seen = set(zip(source.tolist(), epoch.tolist(), row.tolist(), strict=True))
    repeated = sum(x in seen for x in zip(*(part.tolist() for part in again), strict=True))
    assert repeated or not set(source) & set(again[0])


def test_before_the_switch_nothing_changes_and_after_it_the_shares_are_those_of_the_final_mixture():
    p = two_mixtures()
    assert p.final_begins == 30
    for step in range(30):
        for a, b in zip(p.locate(step, np.arange(8)), plain(p).locate(step, np.arange(8)), strict=True):
            assert np.array_equal(a, b)
    after = draws(p, range(30, 55))[0]  # 200 rows, ten periods of 5: 40, 40 and 20 of 100
    assert np.bincount(after).tolist() == [40, 80, 80]
    assert worst_lag(after, p.final_shares) < 1
    assert np.bincount(draws(p, range(30))[0])[0] == 7  # of code: 3 of 100, of 240 rows


def test_a_slot_of_the_final_mixture_knows_nothing_of_the_others():
    p = two_mixtures(batch_size=5)
    whole = {step: p.locate(step, np.arange(5)) for step in range(26, 40)}
    for step in reversed(range(26, 40)):
        for slots in ([3], [4, 0]):
            part = two_mixtures(batch_size=5).locate(step, np.array(slots))
            assert all(np.array_equal(a[slots], b) for a, b in zip(whole[step], part, strict=True))


def test_the_switch_is_where_wsd_begins_to_decay():
    for steps, share in ((50, 0.4), (520, 0.2), (7, 0.01), (1, 0.5), (90_000, 1 / 3)):
        found = mixing.Final({"a": 1}, share, steps).begins()
        rates = optim_rates(steps, share)
        flat = [s for s in (found - 1, found) if s > 0]
        assert all(rates(s) == pytest.approx(1.0) for s in flat)
        assert rates(found + 1) < 1
        assert 0 <= found < steps


def optim_rates(steps, share):
    """The rates of wsd without a warm-up whose decay has this share."""
    c = config.resolve(
        config_files.load(
            "base",
            ["data.dir=d", f"train.steps={steps}"]
            + [f"optim.{key}" for key in ("schedule=wsd", "warmup_steps=0", "lr=1.0", f"decay_fraction={share!r}")],
        )
    )
    return lambda step: float(optim.rates(c.optim, steps)(step))


def test_a_golden_of_the_final_mixture():
    """A change of this golden value means that a run resumed with the new code sees other batches."""
    source, epoch, row = draws(two_mixtures(), [29, 30])
    assert (source.tolist(), epoch.tolist(), row.tolist()) == (
        [2, 2, 2, 2, 2, 1, 2, 2, 1, 2, 0, 1, 2, 1, 2, 0],
        [2, 2, 2, 2, 2, 0, 2, 2, 0, 2, 1, 0, 2, 0, 2, 1],
        [54, 49, 57, 37, 7, 18, 67, 45, 5, 46, 0, 0, 68, 10, 47, 3],
    )


def test_it_begins_with_a_share_or_with_a_branch_whichever_comes_first():
    def begins(share, branch, windows=()):
        return mixing.Final({"a": 1}, share, 50, branch).begins(mixing.merge_windows(windows))

    assert begins(0.4, 0) == 30
    assert begins(0.0, 20) == 20
    assert begins(0.4, 20) == 20
    assert begins(0.4, 40) == 30
    # A share's batch has its number, whatever is passed over; a branch begins behind its trunk's last batch.
    assert begins(0.4, 0, [(3, 5), (28, 35)]) == 30
    assert begins(0.0, 20, [(3, 5), (40, 44)]) == 23
    assert begins(0.4, 29, [(3, 5)]) == 30


@pytest.mark.parametrize("windows", [[(3, 5), (28, 33)], [(30, 30), (40, 45)]])
@pytest.mark.parametrize("branch", [0, 12])
def test_what_is_passed_over_is_cut_out_of_the_same_batches(windows, branch):
    """Those that are left of the share's are the same; a branch has passed over nothing but what lies before or behind it."""
    p, merged = two_mixtures(windows=windows, branch=branch), mixing.merge_windows(windows)
    assert p.final_begins == (mixing.batch_number(branch, merged) if branch else 30)
    whole = two_mixtures() if not branch else two_mixtures(share=0.0, branch=p.final_begins)
    for step in range(60):
        number = mixing.batch_number(step + 1, merged)
        for a, b in zip(p.locate(number - 1, np.arange(8)), whole.locate(number - 1, np.arange(8)), strict=True):
            assert np.array_equal(a, b)


def test_a_source_of_the_final_mixture_alone_must_hold_a_row_too():
    with pytest.raises(ConfigError, match=r"'code' holds 128 training tokens.*129"):
        two_mixtures(128, first={"prose": 1}, last={"code": 1})
    with pytest.raises(ConfigError, match="every mixture weight is 0"):
        two_mixtures(last={"code": 0})


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
    plain, windows = document_rows.Rows(data, MIXTURE, **OPTIONS), [(3, 4), (9, 12), (5, 5), (1, 1)]
    order = document_rows.Rows(data, MIXTURE, **OPTIONS, passed_over=windows)
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
        described = [*document_rows.describe_batch(order, step)]
        assert described == [*document_rows.describe_batch(plain, order.batch_number(step + 1) - 1)]
        text = "".join(part.text for part in described if part.slot == 0)
        assert text.startswith(coder.decode(left[step][0]))


def test_a_window_behind_the_last_step_changes_no_step_before(data):
    before = document_rows.Rows(data, MIXTURE, **OPTIONS, passed_over=[(3, 4)])
    grown = document_rows.Rows(data, MIXTURE, **OPTIONS, passed_over=[(3, 4), (10, 12)])
    steps = range(1, 8)  # batches 1, 2, 5, ..., 9
    assert [before.batch_number(s) for s in steps] == [grown.batch_number(s) for s in steps]
    assert grown.batch_number(8) == 13
