"""The map from slots to rows, the shape of a batch, from a step back to its documents, and how often a source is read."""

import dataclasses
import json
import types

import numpy as np
import pytest
import tiny_pairs

from jaxlm.config import ConfigError
from jaxlm.data.batches import document_rows, loader, pack_examples
from jaxlm.data.batches.order import check_fingerprint
from jaxlm.data.shards import mixture
from jaxlm.data.shards.mixture import Final

MIXTURE = {"prose": 87, "math": 10, "code": 3}


def plan(mixture=None, tokens=None, *, seed=0, seq_len=16, batch_size=8):
    tokens = tokens or {"prose": 16 * 100 + 1, "math": 16 * 30 + 5, "code": 16 * 7 + 16}
    return document_rows.plan_rows(tokens, mixture or MIXTURE, seed=seed, seq_len=seq_len, batch_size=batch_size)


def draws(p, steps):
    located = [p.locate(s, np.arange(p.batch_size)) for s in range(steps)]
    return [np.concatenate(parts) for parts in zip(*located, strict=True)]


@pytest.mark.parametrize("n", [1, 2, 3, 17, 100, 257, 4096, 10_001])
def test_permute_is_a_permutation_that_depends_on_its_key(n):
    images = document_rows.permute(np.arange(n), n, "0/prose/0")
    assert np.array_equal(np.sort(images), np.arange(n))
    if n > 16:
        assert not np.array_equal(images, document_rows.permute(np.arange(n), n, "0/prose/1"))


def test_permute_of_a_huge_range_and_its_spread():
    n = 10**12
    images = document_rows.permute(np.arange(20_000), n, "key")
    assert len(set(images.tolist())) == 20_000
    assert images.min() >= 0
    assert images.max() < n
    shares = np.histogram(images, bins=10, range=(0, n))[0] / 20_000
    assert np.abs(shares - 0.1).max() < 0.01
    steps = np.abs(np.diff(images.astype(float))).mean() / n
    assert abs(steps - 1 / 3) < 0.01  # independent uniform draws are a third apart on average


def test_batches_are_pinned():
    """A change of this golden value means that every run resumed with the new code sees other batches."""
    source, epoch, row = draws(plan(), 2)
    assert source.tolist() == [2, 2, 2, 2, 2, 2, 2, 1, 2, 2, 2, 2, 2, 2, 2, 1]
    assert epoch.tolist() == [0] * 16
    assert row.tolist() == [48, 49, 84, 72, 28, 33, 20, 3, 32, 53, 6, 99, 60, 85, 13, 5]


def test_each_row_comes_once_an_epoch_in_another_order_each_time():
    p = plan()
    source, epoch, row = draws(p, 400)
    for k, n in enumerate(p.row_counts):
        mine = source == k
        passes = [row[mine & (epoch == e)] for e in range(int(epoch[mine].max()))]
        assert len(passes) >= 2
        for rows_of_pass in passes:
            assert np.array_equal(np.sort(rows_of_pass), np.arange(n))
        assert not np.array_equal(passes[0], passes[1])


def test_seed_changes_rows_but_not_sources_and_seeds_are_unrelated():
    a, b = draws(plan(seed=0), 50), draws(plan(seed=1), 50)
    assert np.array_equal(a[0], b[0])
    assert not np.array_equal(a[2], b[2])
    # The order of seed 0 in epoch 1 is not that of seed 1 in epoch 0, as it is with Grain's shuffle.
    prose = a[0] == 2
    assert not np.array_equal(a[2][prose & (a[1] == 1)][:50], b[2][prose & (b[1] == 0)][:50])


@pytest.mark.parametrize(
    ("mixture", "message"),
    [
        ({"prosa": 1}, "prosa.*the data has code, math, prose"),
        ({"prose": -1}, "at least 0"),
        ({"prose": float("nan")}, "at least 0"),
        ({"prose": 0}, "every mixture weight is 0"),
    ],
)
def test_bad_mixtures(mixture, message):
    with pytest.raises(ConfigError, match=message):
        plan(mixture)


def test_a_source_shorter_than_a_row_is_refused():
    with pytest.raises(ConfigError, match=r"'code' holds 128 training tokens.*129"):
        plan(seq_len=128)


def test_make_batch_opens_a_segment_at_each_eos():
    eos = 2
    rows_BxT1 = np.array([[5, 6, eos, 7, 8, 9, eos, eos, 4], [eos, 5, 6, 7, eos, 8, 9, 10, 11]], np.uint16)
    batch = document_rows.make_batch(rows_BxT1, eos)
    assert batch["tokens"].tolist() == rows_BxT1[:, :-1].tolist()
    assert batch["targets"].tolist() == rows_BxT1[:, 1:].tolist()
    assert batch["segment_ids"].tolist() == [[1, 1, 2, 2, 2, 2, 3, 4], [1, 1, 1, 1, 2, 2, 2, 2]]
    assert batch["positions"].tolist() == [[0, 1, 0, 1, 2, 3, 0, 0], [0, 1, 2, 3, 0, 1, 2, 3]]
    assert {k: v.dtype.name for k, v in batch.items()} == {
        "tokens": "int32", "targets": "int32", "segment_ids": "int32", "positions": "int32", "weights": "float32",
    }  # fmt: skip
    assert batch["weights"].all()


def test_no_target_belongs_to_another_document_than_its_context():
    """Of documents made of one repeated id: within a segment only that id, its EOS, and the EOS that ends it, occur."""
    rng, eos = np.random.default_rng(0), 2
    stream = np.concatenate([[3 + i % 100] * rng.integers(1, 9) + [eos] for i in range(300)])
    rows_BxT1 = np.stack([stream[i * 32 : i * 32 + 33] for i in range(20)])
    batch = document_rows.make_batch(rows_BxT1, eos)

    def leaks(segment_ids):
        found = 0
        for tokens, targets, segments in zip(batch["tokens"], batch["targets"], segment_ids, strict=True):
            for segment in np.unique(segments):
                inside = segments == segment
                found += len(set(tokens[inside]) - {eos}) > 1 or len(set(targets[inside]) - {eos}) > 1
        return found

    assert leaks(batch["segment_ids"]) == 0
    closed_by_eos = np.roll(batch["segment_ids"], 1, axis=1)  # the mutation: EOS as the end of the segment before it
    assert leaks(closed_by_eos) > 0


def text(*ids):
    return pack_examples.Segment(ids, [1.0] * (len(ids) - 1))


def test_pack_never_lets_a_group_leave_its_row():
    groups = [[text(9, 1, 2), text(9, 3)], [text(9, 4, 5, 6)], [text(9, 7, 8), text(9, 1)], [text(9, 2)]]
    batch, placed = tiny_pairs.pack(groups, 6, 2)
    assert placed == [0, 0, 1, 1]
    np.testing.assert_array_equal(batch["tokens"], [[9, 1, 9, 9, 4, 5], [9, 7, 9, 9, 0, 0]])
    np.testing.assert_array_equal(batch["targets"], [[1, 2, 3, 4, 5, 6], [7, 8, 1, 2, 0, 0]])
    np.testing.assert_array_equal(batch["segment_ids"], [[1, 1, 2, 3, 3, 3], [1, 1, 2, 3, 4, 4]])
    np.testing.assert_array_equal(batch["positions"], [[0, 1, 0, 0, 1, 2], [0, 1, 0, 0, 0, 1]])
    np.testing.assert_array_equal(batch["weights"], [[1] * 6, [1, 1, 1, 1, 0, 0]])
    assert {name: x.dtype.name for name, x in batch.items()} == {
        **dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), "int32"),
        "weights": "float32",
    }


def test_pack_stops_at_the_first_group_without_room_so_that_the_next_batch_begins_with_it():
    groups = [[text(9, 1, 2, 3)], [text(9, 1, 2, 3)], [text(9, 1)]]
    _, placed = tiny_pairs.pack(groups, 4, 1)
    assert placed == [0]  # the third would fit, but order is order
    _, placed = tiny_pairs.pack(groups[1:], 4, 1)
    assert placed == [0, 0]
    assert not pack_examples.pack([[]], seq_len=4)["weights"].any()


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ([text(9, 1, 2), text(9, 1, 2)], "a group of 4 tokens exceeds train.seq_len=3"),
        ([text(9)], "it needs two tokens or more"),
        ([pack_examples.Segment((9, 1), (1.0, 1.0))], "a text of 2 tokens with 2 weights can't be packed"),
    ],
)
def test_what_cannot_be_packed_is_one_line(group, message):
    with pytest.raises(ConfigError, match=message):
        pack_examples.pack([group], seq_len=3)


OPTIONS = {"seed": 7, "seq_len": 24, "batch_size": 8}
FINAL = Final({"math": 60, "code": 40}, share=0.4, steps=20)  # from batch 13 on


def with_final(data, **changes) -> document_rows.Rows:
    return document_rows.Rows(data, MIXTURE, **OPTIONS, final=dataclasses.replace(FINAL, **changes))


def test_the_fingerprint_knows_the_final_mixture_and_is_what_it_was_without_one(data):
    plain, saved = document_rows.Rows(data, MIXTURE, **OPTIONS).fingerprint(), with_final(data).fingerprint()
    assert [*plain] == ["data", "mixture", "seed", "seq_len", "batch_size", "sha256"]
    assert {key: saved[key] for key in saved.keys() - plain.keys()} == {
        "final": "code 2/5, math 3/5", "final_share": "0.4", "final_batch": "12",
    }  # fmt: skip
    assert saved["sha256"] != plain["sha256"]
    check_fingerprint(saved, dict(saved), 20)


@pytest.mark.parametrize(
    ("was", "now", "message"),
    [
        ({}, {"mixture": {"math": 1, "code": 1}},
         "data.final.weights was code 2/5, math 3/5, is code 1/2, math 1/2; set"),
        ({}, {"share": 0.5}, "data.final.share was 0.4, is 0.5; set them back"),
        ({}, None, "data.final.weights was code 2/5, math 3/5, is not set; data.final.share was 0.4, is not set"),
        (None, {}, "data.final.weights was not set, is code 2/5, math 3/5"),
    ],
)  # fmt: skip
def test_a_run_keeps_its_final_mixture_even_before_it_begins(data, was, now, message):
    plain = document_rows.Rows(data, MIXTURE, **OPTIONS)
    saved, current = ((plain if x is None else with_final(data, **x)).fingerprint() for x in (was, now))
    with pytest.raises(ConfigError, match=message) as error:
        check_fingerprint(saved, current, 3)
    assert "\n" not in str(error.value)
    check_fingerprint(saved, current, 3, branch=True)  # a branch may take another one


def test_more_steps_move_the_final_mixture_until_it_has_begun(data):
    """A share of 0.4: after batch 12 of 20, after batch 24 of 40."""
    saved, longer = with_final(data).fingerprint(), with_final(data, steps=40).fingerprint()
    for a, b in ((saved, longer), (longer, saved)):
        check_fingerprint(a, b, 12)
        with pytest.raises(ConfigError, match=r"data\.final can't change at step 13: .* optim\.schedule_steps"):
            check_fingerprint(a, b, 13)
    check_fingerprint(saved, longer, 10, [[3, 4]])  # step 11 is batch 13 if two batches were passed over
    with pytest.raises(ConfigError, match="at step 11: it was to begin after batch 12, now after batch 24"):
        check_fingerprint(saved, longer, 11, [[3, 4]])


def test_a_branch_takes_a_final_mixture_from_its_first_step_on_or_keeps_the_one_that_has_begun(data):
    plain, trunk = document_rows.Rows(data, MIXTURE, **OPTIONS).fingerprint(), with_final(data).fingerprint()
    other = {"mixture": {"prose": 1}, "share": 0.0}

    def check(saved, step, windows=(), **changes):
        check_fingerprint(saved, with_final(data, **changes).fingerprint(), step, windows, branch=True)

    for step, windows in ((8, ()), (12, ()), (8, [[2, 3]])):
        for saved in (plain, trunk):
            check(saved, step, windows, **other, branch=step)
            check(saved, step, windows, branch=step)
    check(trunk, 15, branch=15)
    with pytest.raises(ConfigError, match="can't change at step 15"):
        check(trunk, 15, **other, branch=15)
    with pytest.raises(ConfigError, match="can't change at step 15: it was to begin never, now after batch 12"):
        check(plain, 15, branch=15)
    with pytest.raises(ConfigError, match="seed was"):
        check_fingerprint(trunk | {"seed": "8"}, with_final(data).fingerprint(), 3, branch=True)


def test_trace_names_the_documents_that_the_loader_yields(data, corpus):
    raw = {
        (source.name, f"{source.name}.jsonl:{number}"): json.loads(line)["text"]
        for source in corpus.sources
        for number, line in enumerate(open(source.spec), start=1)
    }
    coder = data.tokenizer()
    with loader.TrainLoader(document_rows.Rows(data, MIXTURE, **OPTIONS), start_step=3) as batches:
        for step in range(3, 23):
            batch = next(batches)
            traced = [*document_rows.describe_batch(document_rows.Rows(data, MIXTURE, **OPTIONS), step)]
            assert [part.slot for part in traced] == sorted(part.slot for part in traced)
            for slot in range(8):
                row = [part for part in traced if part.slot == slot]
                ids = np.append(batch["tokens"][slot], batch["targets"][slot, -1])
                assert "".join(part.text for part in row) == coder.decode(ids)
                assert sum(part.tokens for part in row) == 25
                for part in row:
                    whole = raw[part.source, part.document]
                    assert part.text in whole
                    assert part.first_token > 0 or whole.startswith(part.text)


def test_both_mixtures_count_each_for_its_steps():
    """80 steps with 3/4 of `web`, then 20 with a quarter of it; `best` is read at the end alone."""
    data = types.SimpleNamespace(token_counts=lambda: {"web": 1000, "code": 6400, "best": 320, "unused": 5})
    final = mixture.Final({"web": 1.0, "best": 3.0}, share=0.2, steps=100)
    order = document_rows.Rows(data, {"web": 3.0, "code": 1.0, "unused": 0.0}, 0, seq_len=32, batch_size=4, final=final)
    assert order.passes(100) == pytest.approx({"web": 7.68 + 0.64, "code": 0.4, "best": 6.0})
    assert order.passes(80) == pytest.approx({"web": 7.68, "code": 0.4, "best": 0.0})
    assert order.passes(40) == pytest.approx({"web": 3.84, "code": 0.2, "best": 0.0})
    assert document_rows.mixture_words(order, 100) == "web 0.75, code 0.25 to step 80, then best 0.75, web 0.25"
    assert document_rows.mixture_words(order, 80).endswith("then best 0.75, web 0.25 (this run ends at step 80)")
    # Ten batches that were passed over: 70 steps are left of the first 80 batches, so that 30 draw from the final mixture.
    over = order.passing_over([(11, 20)])
    assert over.passes(100)["best"] == pytest.approx(9.0)
    assert "to step 70, then" in document_rows.mixture_words(over, 100)
    assert document_rows.mixture_words(document_rows.Rows(data, {"web": 1.0}, 0, seq_len=32, batch_size=4), 100) == ""
