"""Documents that keep their places and teach nothing: each token and weight, held against a walk over documents."""

import dataclasses
import hashlib
import json

import jax
import numpy as np
import pytest
import tiny_data
from tiny_steps import make_mesh, one_layer, run_steps

from jaxlm.config import ConfigError
from jaxlm.data.batches import document_rows, removed
from jaxlm.data.batches.order import check_fingerprint
from jaxlm.data.shards import search
from jaxlm.data.shards.mixture import Final
from jaxlm.step import parts
from jaxlm.step.objectives import lm

STEPS = 60  # several epochs, and the final mixture


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny_data.make(tmp_path_factory.mktemp("data") / "d", {"a": 3.0, "b": 1.0})


def make_list(path, data, chosen):
    """Writes the list of `chosen`, (source, split, number of the document)."""
    decode, rows = data.decoder(), []
    for source, split, number in chosen:
        each, ids_N = list(search.each_document(data, source, split))[number]
        sha256 = hashlib.sha256(decode(ids_N)[0]).hexdigest()
        rows.append({"source": source, "split": split, "doc_id": each.doc_id, "sha256": sha256, "why": "test"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


CHOSEN = [("a", "train", 3), ("a", "train", 4), ("a", "train", 30), ("b", "train", 7), ("b", "val", 0)]


def orders(tmp_path, data, seed=0, seq_len=8, chosen=CHOSEN):
    """The order of a run, and of its branch without the documents. Of 8 tokens a row, some documents cover three."""
    final = Final({"a": 1.0, "b": 4.0}, share=0.4, steps=STEPS)
    options = {"seed": seed, "seq_len": seq_len, "batch_size": 8, "final": final, "passed_over": ((5, 6),)}
    whole = document_rows.Rows(data, {"a": 3, "b": 1}, **options)
    without = removed.read(data, make_list(tmp_path / "list.jsonl", data, chosen))
    return whole, dataclasses.replace(whole, removed=without)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_walk(tmp_path, data, seed):
    """Of each target by hand: which document it is in, and what weight and token it then has."""
    whole, branch = orders(tmp_path, data, seed)
    owner = {}  # source -> for each token, the number of its document
    for source in ("a", "b"):
        sizes = [each.tokens for each, _ in search.each_document(data, source, "train")]
        owner[source] = np.repeat(np.arange(len(sizes)), sizes)
    gone = {(source, number) for source, split, number in CHOSEN if split == "train"}
    first, blanked, rows_of_document = None, 0, {}
    for item in range(STEPS):
        old, new = whole.batch(item), branch.batch(item)
        number = whole.batch_number(item + 1) - 1
        for slot, (k, _, row) in enumerate(zip(*whole.plan.locate(number, np.arange(8)), strict=True)):
            source = whole.plan.names[k]
            for t in range(8):
                of, target = owner[source][row * 8 + t], owner[source][row * 8 + t + 1]
                is_gone, opens = (source, target) in gone, old["targets"][slot, t] == data.separator_id
                after = opens and (source, of) in gone
                assert new["weights"][slot, t] == (0 if (is_gone and not opens) or after else 1)
                replaced = is_gone and not opens
                assert new["targets"][slot, t] == (branch.removed.token if replaced else old["targets"][slot, t])
                if replaced:
                    blanked += 1
                    first = first or item + 1
                    rows_of_document.setdefault((source, target), set()).add(row)
            replaced = (source, owner[source][row * 8]) in gone and old["tokens"][slot, 0] != data.separator_id
            assert (new["tokens"][slot, 0] == branch.removed.token) or not replaced
            np.testing.assert_array_equal(new["tokens"][slot, 1:], new["targets"][slot, :-1])
        for name in ("segment_ids", "positions"):
            np.testing.assert_array_equal(new[name], old[name])
    assert blanked
    assert max(map(len, rows_of_document.values())) >= 3
    assert branch.first_removed == whole.batch_number(first)
    assert whole.first_removed == np.inf


def test_the_first_batch_where_a_source_begins_with_the_final_mixture(tmp_path, data):
    _, branch = orders(tmp_path, data, chosen=[("b", "train", 7)])
    late = dataclasses.replace(branch, mixture={"a": 1})
    seen = [item for item in range(400) if not late.batch(item)["weights"].all()]
    assert late.first_removed == late.batch_number(seen[0] + 1)
    assert seen[0] + 1 > late.switch() > 0
    never = dataclasses.replace(branch, final=Final({"a": 1.0}, share=1.0, steps=STEPS), mixture={"a": 1})
    assert never.first_removed == np.inf


def test_no_steps_saw_what_was_taken_out(tmp_path, data):
    whole, branch = orders(tmp_path, data)
    documents = [each for each, _ in search.each_document(data, "a", "train")]
    for number in (2, 3, 5):
        seen = [
            document_rows.steps_of(x, "a", documents[number].start, documents[number].tokens, STEPS)
            for x in (whole, branch)
        ]
        assert seen[1] == ([] if number == 3 else seen[0])
        assert seen[0]


def test_a_branch_may_begin_before_the_first_batch_and_a_run_keeps_its_list(tmp_path, data):
    pairs = (orders(tmp_path, data, chosen=[("a", "train", number)]) for number in range(40))
    whole, branch = next((whole, branch) for whole, branch in pairs if branch.first_removed >= 4)
    saved, current, first = whole.fingerprint(), branch.fingerprint(), branch.first_removed
    check_fingerprint(saved, current, first - 1, branch=True)
    check_fingerprint(saved, current, first - 3, [[1, 2]], branch=True)
    check_fingerprint(current, current, STEPS)
    check_fingerprint(current, current | {"without_batch": "1"}, STEPS)  # as more steps may move a final mixture
    for was, now, done, options in (
        (saved, current, first, {"branch": True}),
        (saved, current, first - 2, {"branch": True, "passed_over": [[1, 2]]}),
        (saved, current, first - 1, {}),
        (current, saved, first - 1, {}),
        (current, saved, first - 1, {"branch": True}),
        (current, current | {"without": "other"}, first - 1, {"branch": True}),
    ):
        with pytest.raises(ConfigError, match=r"data\.without was") as error:
            check_fingerprint(was, now, done, **options)
        assert "\n" not in str(error.value)


def test_a_document_that_no_row_holds_is_never_seen(tmp_path, data):
    """The last tokens of a stream fill no row."""
    whole, branch = orders(tmp_path, data, seq_len=200, chosen=[("b", "train", -1)])
    tokens = data.token_counts()["b"]
    assert branch.removed.places["b"][0, 0] > (tokens - 1) // 200 * 200
    assert branch.first_removed == np.inf
    assert branch.fingerprint()["without_batch"] == "inf"
    assert whole.first_removed == np.inf


def test_batches_that_are_passed_over_show_no_document(tmp_path, data):
    _, branch = orders(tmp_path, data, chosen=[("a", "train", 9)])
    first = branch.first_removed
    later = branch.passing_over([(first, first)])
    seen = [later.batch_number(item + 1) for item in range(STEPS) if not later.batch(item)["weights"].all()]
    assert later.first_removed == seen[0] > first


def test_a_large_batch_number_stays_whole(tmp_path, data):
    _, branch = orders(tmp_path, data)
    branch.__dict__["first_removed"] = 1234567
    assert branch.parts()["without_batch"] == "1234567"


def test_a_step_names_no_document_that_is_left_out(tmp_path, data):
    whole, branch = orders(tmp_path, data)
    gone = {
        list(search.each_document(data, source, split))[n][0].doc_id for source, split, n in CHOSEN if split == "train"
    }
    named = [order.places(step) for order in (whole, branch) for step in range(1, 9)]
    assert gone & {doc_id for step in named[:8] for doc_id in step}
    assert [[doc_id for doc_id in step if doc_id not in gone] for step in named[:8]] == named[8:]


def test_held_out_documents_alone_are_refused(tmp_path, data):
    with pytest.raises(ConfigError, match=r"all documents of .* are held out: training never reads them"):
        orders(tmp_path, data, chosen=[("b", "val", 0)])


@pytest.mark.parametrize("devices", [1, 8])
def test_a_step_is_that_of_a_batch_in_which_the_documents_say_something_else(tmp_path, data, devices):
    """To the bit: their own words at weight 0 give the parameters and moments that the one id gives."""
    whole, branch = orders(tmp_path, data, seq_len=32)
    item = int(branch.first_removed) - 3  # two batches were passed over
    own, blank = whole.batch(item), branch.batch(item)
    assert (own["tokens"] != blank["tokens"]).any()
    made = parts.make(one_layer(model__vocab_size=data.vocab_size), make_mesh(fsdp=devices), lm.make)
    program = made.jit()
    states = [
        run_steps(made, [batch], program=program)[0] for batch in (blank, own | {"weights": blank["weights"]}, own)
    ]
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get(states[:2]))
    kernels = [jax.device_get(state.params["params"]["final_norm"]["scale"]) for state in states]
    assert (kernels[1] != kernels[2]).any()
