"""Batches of chats and pairs: packed = one by one, resumed = uninterrupted, several hosts = one, replay as much as asked."""

import itertools
import json
import random

import numpy as np
import pytest
import tiny_chats
import tiny_data
import tiny_models as tiny
import tiny_pairs

from jaxlm import models
from jaxlm.config import ConfigError
from jaxlm.data.batches import document_rows, example_rows, loader, pack_examples, replay
from jaxlm.data.chats import chat, masks
from jaxlm.data.chats.examples import Place
from jaxlm.data.tokenizer import coder
from jaxlm.eval import held_out

SIZES = (0, 192, 4)  # seed, T, B


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_chats.tokenizer()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples")
    return {False: tiny_chats.chats(folder / "c.jsonl", 60, turns=3), True: tiny_chats.pairs(folder / "p.jsonl", 60)}


@pytest.fixture(scope="module", params=[False, True], ids=["chats", "pairs"])
def given(request, files, tokenizer):
    return tiny_chats.make(files[request.param], tokenizer, pairs=request.param, sizes=SIZES)


@pytest.fixture(scope="module")
def text(tmp_path_factory, tokenizer):
    """Pretraining text of short documents."""
    path, rng = tmp_path_factory.mktemp("text") / "a.jsonl", random.Random(0)
    path.write_text("".join(json.dumps({"text": tiny_chats.words(rng, 40)}) + "\n" for _ in range(400)))
    return replay.open_text(str(path), tokenizer, text_key="text", val_fraction=0.01)


def segments(batch, row: int) -> list[tuple[list[int], list[float]]]:
    """(ids, weights of all but the first) of each text in a row, but for the padding."""
    found, ids = [], batch["segment_ids"][row]
    for segment in range(1, ids.max() + 1):
        inside = ids == segment
        tokens, targets = (batch[name][row][inside].tolist() for name in ("tokens", "targets"))
        assert batch["positions"][row][inside].tolist() == list(range(inside.sum()))
        if tokens[1:] == targets[:-1] and any(tokens):
            found.append(([*tokens, targets[-1]], batch["weights"][row][inside].tolist()))
    return found


def of_example(source, number: int) -> list[tuple[list[int], list[float]]]:
    return [(ids.tolist(), (kinds[1:] != masks.GIVEN).astype(float).tolist()) for ids, kinds in source.segments(number)]


def test_each_text_stands_whole_in_its_row(given):
    """With its own weights; a pair is two neighbours, the chosen side first, each with its margin."""
    for step in range(8):
        batch, planned = given.batch(step), given.plan.rows(step)
        assert {name: (x.dtype, x.shape) for name, x in batch.items() if name not in ("margin", "pair")} == {
            name: (np.dtype(np.float32 if name == "weights" else np.int32), (4, 192))
            for name in ("tokens", "targets", "segment_ids", "positions", "weights")
        }
        for row, items in enumerate(planned):
            want = [segment for item in items for segment in of_example(given.train, item.number)]
            assert segments(batch, row) == want
            assert batch["weights"][row].sum() == given.train.counted()[[item.number for item in items]].sum()
            if given.pairs:
                numbers = [item.number for item in items]
                empty = [0.0] * (3 - len(numbers))
                assert batch["pair"][row].tolist() == [1.0] * len(numbers) + empty
                assert batch["margin"][row].tolist() == given.train.margins_E[numbers].tolist() + empty


def test_packed_is_one_by_one(files, tokenizer):
    """The loss of a batch is that of its examples, each alone in a row."""
    cfg = tiny.model_config(vocab_size=tokenizer.vocab_size, n_layers=1)
    model = models.build(cfg, "xla")
    params = tiny.random_params(model)
    made = tiny_chats.make(files[False], tokenizer, sizes=SIZES)
    whole, planned = made.batch(2), made.plan.rows(2)

    @tiny.jit
    def nll(batch):
        return held_out.summed_nll(model, 0)({"params": params}, batch)

    alone = []
    for item in (item for row in planned for item in row):
        ((ids, weights),) = of_example(made.train, item.number)
        alone.append(tiny_pairs.pack([[pack_examples.Segment(ids, weights)]], 192, 4)[0])
    want = sum(map(nll, alone))
    np.testing.assert_allclose(nll(whole), want, rtol=1e-5)
    crossed = whole | {"segment_ids": np.ones_like(whole["segment_ids"])}  # the mutation: texts see those before them
    assert abs(nll(crossed) - want) > 1e-4 * want  # ten times the tolerance above


def take(made, count: int, **options):
    with loader.TrainLoader(made, **options) as batches:
        return list(itertools.islice(batches, count))


def same(a, b) -> bool:
    return len(a) == len(b) and all(
        x.keys() == y.keys() and all(np.array_equal(x[k], y[k]) for k in x) for x, y in zip(a, b, strict=True)
    )


def test_resumed_and_on_several_hosts(given, files, tokenizer):
    whole = [given.batch(step) for step in range(12)]
    assert same(take(given, 12, num_threads=3), whole)
    again = tiny_chats.make(files[given.pairs], tokenizer, pairs=given.pairs, sizes=SIZES)  # another process
    assert same(take(again, 5, start_step=7), whole[7:])
    halves = [take(given, 4, row_indices=np.asarray(rows)) for rows in ([0, 2], [1, 3])]
    for step, (first, second) in enumerate(zip(*halves, strict=True)):
        assert all(np.array_equal(first[k], whole[step][k][[0, 2]]) for k in first)
        assert all(np.array_equal(second[k], whole[step][k][[1, 3]]) for k in second)
    assert not same(
        take(tiny_chats.make(files[given.pairs], tokenizer, pairs=given.pairs, sizes=(1, 192, 4)), 3), whole[:3]
    )


def test_from_step_37_come_the_batches_of_step_37(given):
    """Counted once: a source that began there, and was sliced from there as well, would give those of step 74."""
    other = given.passing_over(((2, 3), (38, 38)))
    assert same(take(other, 4, start_step=37), [given.batch(number) for number in (40, 41, 42, 43)])


def test_batches_are_passed_over(given):
    other = given.passing_over(((2, 3), (6, 6)))
    assert [other.batch_number(step) for step in (0, 1, 2, 3, 4)] == [0, 1, 4, 5, 7]
    assert same([other.batch(step) for step in range(4)], [given.batch(number) for number in (0, 3, 4, 6)])
    assert other.fingerprint() == given.fingerprint()
    assert other.places(2) == given.places(4)
    wanted = [str(given.train.places[item.number]) for row in given.plan.rows(0) for item in row]
    assert given.places(1) == wanted
    assert wanted[0].rpartition(":")[0].endswith(".jsonl")


def test_what_is_held_out_comes_once_and_is_trained_on_never(given):
    batches = list(given.held_out(3))
    assert len(batches) == given.held_out_batches(3)
    found = [segment for batch in batches for row in range(3) for segment in segments(batch, row)]
    want = [segment for number in range(len(given.val)) for segment in of_example(given.val, number)]
    assert sorted(found) == sorted(want)
    train = [segment for number in range(len(given.train)) for segment in of_example(given.train, number)]
    assert len(given.val) + len(given.train) == 60
    assert not {tuple(ids) for ids, _ in want} & {tuple(ids) for ids, _ in train}
    assert sum(batch["weights"].sum() for batch in batches) == given.val.counted().sum()
    ends = sum((kinds == masks.ENDS).sum() for n in range(len(given.val)) for _, kinds in given.val.segments(n))
    without = sum(batch["weights"].sum() for batch in given.held_out(3, ends=False))
    assert without == given.val.counted().sum() - ends
    assert ends > 0


def test_held_out_examples_of_another_file(files, tokenizer, tmp_path):
    path = tiny_chats.chats(tmp_path / "v.jsonl", 5, seed=9)
    made = tiny_chats.make(files[False], tokenizer, sizes=SIZES, overrides=[f"examples.val_path={path}"])
    assert (len(made.train), len(made.val)) == (60, 5)
    assert made.val.places[0] == Place(path, 1)


def test_a_reference_judges_each_pair_once(files, tokenizer):
    made = tiny_chats.make(files[True], tokenizer, pairs=True, sizes=(0, 256, 4))
    assert pack_examples.pairs_in_row(256) == 4
    for val, source in ((False, made.train), (True, made.val)):
        numbers = [n for _, numbers_BxP in made.judged(val, 4) for n in numbers_BxP.ravel().tolist() if n >= 0]
        assert sorted(numbers) == list(range(len(source)))
        for batch, numbers_BxP in made.judged(val, 4):
            np.testing.assert_array_equal(batch["pair"] > 0, numbers_BxP >= 0)
            np.testing.assert_array_equal(
                batch["margin"][numbers_BxP >= 0], source.margins_E[numbers_BxP[numbers_BxP >= 0]]
            )
    train, val = (np.arange(2 * len(s), dtype=np.float32).reshape(-1, 2) + 1 for s in (made.train, made.val))
    told = made.with_reference(train, val)
    assert told.fingerprint() == made.fingerprint()
    batch, planned = told.batch(3), made.plan.rows(3)
    for row, items in enumerate(planned):
        want = [x for item in items for x in train[item.number].tolist()]
        assert batch["reference"][row].tolist() == want + [0.0] * (8 - len(want))
    assert sum(batch["reference"].sum() for batch in told.held_out(4)) == val.sum()
    assert "reference" not in made.batch(3)


def test_pairs_of_a_row_are_no_more_than_fit_into_the_arrays(tokenizer, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"prompt": "{i}", "chosen": "sun", "rejected": "sea"}}\n' for i in range(40)))
    made = tiny_chats.make(str(path), tokenizer, pairs=True, sizes=(0, 128, 2))
    assert made.train.lengths().max() * 3 < 128
    assert made.batch(0)["pair"].tolist() == [[1.0, 1.0]] * 2


@pytest.mark.parametrize("share", [0.05, 0.4])
def test_replayed_text_is_its_share_of_what_counts(files, tokenizer, text, share):
    """All its targets count, documents see only themselves, and the examples are as without it."""
    made = tiny_chats.make(files[False], tokenizer, sizes=SIZES, replay=text, share=share)
    plain = tiny_chats.make(files[False], tokenizer, sizes=SIZES)
    weights = replayed = 0
    for step in range(40):
        batch = made.batch(step)
        weights += batch["weights"].sum()
        for row, items in enumerate(made.plan.rows(step)):
            parts = segments(batch, row)
            for item in items:
                if item.replay:
                    for piece in made.replay.segments(item.number):
                        assert (list(piece.ids), list(piece.weights)) in parts
                        assert tokenizer.eos_id not in list(piece.ids)[1:-1]
                        replayed += len(piece.weights)
    assert replayed / weights == pytest.approx(share, abs=0.01)
    first = [item.number for row in plain.plan.rows(0) for item in row]
    mixed = [item.number for step in (0, 1) for row in made.plan.rows(step) for item in row if not item.replay]
    assert set(first) <= set(mixed)
    assert made.passes(40)["replay"] == pytest.approx(replayed / text.token_counts()["replay"], rel=0.01)
    assert made.fingerprint()["replay"] != plain.fingerprint()["replay"]


def test_pairs_and_prompts_are_trained_without_replay(files, tokenizer, text):
    assert tiny_chats.make(files[True], tokenizer, pairs=True, sizes=SIZES, replay=text, share=0.5).replay is None
    prompted = coder.Prompted(tokenizer, 3, 320)
    assert tiny_chats.make(files[False], prompted, sizes=SIZES, replay=text, share=0.5).replay is None


def test_a_prompt_stands_before_each_text_and_is_no_target(files, tokenizer):
    prompted = coder.Prompted(tokenizer, 3, 384)
    made, plain = (tiny_chats.make(files[False], c, sizes=(0, 96, 4)) for c in (prompted, tokenizer))
    batch = made.batch(0)
    assert batch["targets"].max() < 384 <= batch["tokens"].max()
    for row, items in enumerate(made.plan.rows(0)):
        ids, first = batch["tokens"][row], 0
        for item in items:
            ((want, kinds),) = plain.train.segments(item.number)
            n = len(want) + 2
            assert ids[first : first + n].tolist() == [384, 385, 386, *want[:-1].tolist()]
            weights = batch["weights"][row, first : first + n].tolist()
            assert weights == [0, 0, 0, *(kinds[1:] != masks.GIVEN).tolist()]
            first += n
    assert made.data.sha256 != plain.data.sha256


def test_the_fingerprint_knows_what_decides_the_batches(given, files, tokenizer, tmp_path):
    def fingerprint(**changes):
        found = {"path": files[given.pairs], "sizes": SIZES} | changes
        return tiny_chats.make(found["path"], tokenizer, pairs=given.pairs, sizes=found["sizes"]).fingerprint()

    assert fingerprint() == given.fingerprint()
    lines = open(files[given.pairs]).read().replace("sun", "moon")
    (tmp_path / "o.jsonl").write_text(lines)
    (tmp_path / "same.jsonl").write_text(open(files[given.pairs]).read())
    others = [fingerprint(sizes=(1, 192, 4)), fingerprint(sizes=(0, 193, 4)), fingerprint(sizes=(0, 192, 5))]
    others.append(fingerprint(path=str(tmp_path / "o.jsonl")))
    assert len({other["sha256"] for other in others} | {given.fingerprint()["sha256"]}) == 5
    assert fingerprint(path=str(tmp_path / "same.jsonl")) == given.fingerprint()  # wherever it lies


def test_what_is_told(tokenizer, tmp_path):
    said = []
    path = tiny_chats.pairs(tmp_path / "one.jsonl", 1)
    made = tiny_chats.make(path, tokenizer, pairs=True, sizes=SIZES, say=said.append)
    assert (len(made.train), len(made.val), list(made.held_out(2))) == (1, 0, [])
    (line,) = said
    assert line.startswith("none of the pairs is held out, since there is one pair")
    assert made.batch(5)["pair"].sum(1).all()  # again and again
    assert made.data.token_counts() == {"examples": int(made.train.lengths().sum())}
    assert made.data.vocab_size == tokenizer.vocab_size
    assert made.passes(10)["examples"] > 10
    said.clear()
    tiny_chats.make(tiny_chats.chats(tmp_path / "c.jsonl", 30, 4), tokenizer, sizes=(0, 120, 4), say=said.append)
    assert [line.partition(" of 30 chats ")[2].partition(" ")[0] for line in said] == ["lost", "are"]
    assert "held out, too few to judge by: a new run may have" in said[1]


@pytest.mark.parametrize("pairs", [False, True])
def test_nothing_to_train_on(pairs, tokenizer, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "one", "chosen": "two", "rejected": "two"}\n' if pairs else "")
    with pytest.raises(ConfigError, match=r"a.jsonl: none of its [01] (chats|pairs) can be trained on: .*"):
        tiny_chats.make(str(path), tokenizer, pairs=pairs, sizes=SIZES)


RNG = np.random.default_rng(0)
LENGTHS = RNG.integers(2, 33, 50)
COUNTED = LENGTHS // 2
PLANNED = {"seed": 3, "seq_len": 32, "batch_size": 4}


def plan(**changes) -> example_rows.Plan:
    return example_rows.Plan(LENGTHS, COUNTED, **PLANNED | changes)


def items(planned) -> list[example_rows.Item]:
    return list(itertools.chain.from_iterable(planned))


def test_rows_are_those_of_pack():
    """Example by example, on batches until all were in twice."""
    made, stream = plan(), []
    for epoch in range(3):
        stream += document_rows.permute(np.arange(50), 50, f"3/examples/{epoch}").tolist()
    at = 0
    for batch in range(20):
        rest = [[pack_examples.Segment([0] * (LENGTHS[i] + 1), [0.0] * LENGTHS[i])] for i in stream[at:]]
        _, placed = tiny_pairs.pack(rest, 32, 4)
        want = [[stream[at + n] for n, row in enumerate(placed) if row == r] for r in range(4)]
        assert [[item.number for item in row] for row in made.rows(batch)] == want
        at += len(placed)
        assert made.used(batch + 1) == (at, 0)
    assert at > 100


def test_each_epoch_has_every_example_once():
    made, seen = plan(), np.zeros(50, int)
    for batch in range(40):
        for item in items(made.rows(batch)):
            seen[item.number] += 1
        epoch = made.used(batch + 1)[0] // 50
        assert seen.min() >= epoch
        assert seen.max() <= epoch + 1
    assert plan(seed=4).rows(0) != made.rows(0)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny_data.make(tmp_path_factory.mktemp("data") / "d", {"a": 3.0, "b": 1.0})


def test_pieces_are_rows_of_the_data(data):
    """Their texts are the segments of a pretraining row, and their targets its targets."""
    pieces = replay.Pieces(data, 48, seed=5)
    plan = document_rows.plan_rows(data.token_counts(), data.mixture, seed=5, seq_len=48, batch_size=1)
    for number in range(40):
        source, _, row = plan.locate(number, np.zeros(1, np.int64))
        read = data.stream(plan.names[source[0]]).read(row[0] * 48, row[0] * 48 + 49)
        want = document_rows.make_batch(read[None], data.separator_id)
        found = pack_examples.pack([pieces.segments(number)], 48)
        for name in want:
            np.testing.assert_array_equal(found[name], want[name], err_msg=name)
    used = pieces.passes(40)
    assert used["a"] * data.token_counts()["a"] == pytest.approx(3 * used["b"] * data.token_counts()["b"])


def test_a_data_directory_is_opened_if_its_ids_are_the_models(data):
    options = {"text_key": "text", "val_fraction": 0.1}
    for tokenizer in (data.tokenizer(), chat.grown(data.tokenizer())):
        assert replay.open_text(str(data.path), tokenizer, **options).sha256 == data.sha256
    with pytest.raises(ConfigError, match="has another tokenizer: set replay"):
        replay.open_text(str(data.path), tiny_chats.tokenizer(), **options)


def test_text_files(tmp_path):
    """Each document once, opened by EOS, in the one split or the other; held out is what the loader reads."""
    texts = [f"one two {' three' * (i % 5)} {i}" for i in range(200)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"said": text}) + "\n" for text in texts))
    tokenizer = tiny_chats.tokenizer()
    text = replay.open_text(str(tmp_path), tokenizer, text_key="said", val_fraction=0.2)
    seen = {}
    for split in ("train", "val"):
        stream = text.stream(replay.NAME, split)
        ids = stream.read(0, stream.tokens)
        assert stream.tokens == text.token_counts(split)[replay.NAME]
        seen[split] = [tokenizer.decode(part) for part in np.split(ids, np.flatnonzero(ids == tokenizer.eos_id))[1:]]
    assert sorted(seen["train"] + seen["val"]) == sorted(texts)
    assert 20 < len(seen["val"]) < 60
    held_out = list(document_rows.validation_rows(text, replay.NAME, seq_len=32, batch_size=4))
    assert sum(batch.target_bytes for batch in held_out) == sum(len(one.encode()) for one in seen["val"])


def test_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    options = {"text_key": "text"}
    tokenizer = tiny_chats.tokenizer()
    with pytest.raises(ConfigError, match="no such file or folder"):
        replay.open_text(str(tmp_path / "b"), tokenizer, val_fraction=0.1, **options)
    with pytest.raises(ConfigError, match="has no text to learn from"):
        replay.open_text(str(tmp_path), tokenizer, val_fraction=0.999999, **options)
    short = replay.open_text(str(tmp_path), tokenizer, val_fraction=1e-9, **options)
    with pytest.raises(ConfigError, match="fewer than one row"):
        replay.Pieces(short, 128, seed=0)
