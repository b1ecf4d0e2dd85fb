"""Votes and pairs that an arena writes are what `jaxlm compare` and the reader of DPO's pairs take."""

import json

import pytest

from jaxlm.cli import cli
from jaxlm.data.chats import examples
from jaxlm.eval import compare
from jaxlm.serve.arena.store import Store, Vote, write_pairs


@pytest.fixture
def voted(tmp_path, monkeypatch):
    """An arena of two files of samples, in which a rater finds that the second is better 12 of 14 times, and ties once."""
    monkeypatch.chdir(tmp_path)
    for name in ("alpha", "beta"):
        lines = [json.dumps({"prompt": f"question {n}?", "text": f"{name} {n}"}) + "\n" for n in range(14)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    store = Store(tmp_path / "arena.sqlite")
    for name, number in zip(
        ("alpha", "beta"), store.enter({f"file {tmp_path}/{n}.jsonl": n for n in ("alpha", "beta")}), strict=True
    ):
        store.answer(number, {f"question {n}?": f"{name} {n}" for n in range(14)})
    while ballot := store.ballot("ann"):
        number = int(ballot.prompt.split()[1].rstrip("?"))
        better = "alpha" if number == 0 else "beta"
        choice = "both bad" if number == 1 else "left" if ballot.left.startswith(better) else "right"
        store.vote(ballot.token, "ann", choice)
    store.close()
    return tmp_path


def test_votes_are_read_by_compare(voted, capsys):
    assert cli.main(["arena", "alpha.jsonl", "beta.jsonl", "--export-votes=votes.jsonl"]) == 0
    assert capsys.readouterr().err == "14 votes in votes.jsonl\n"
    lines = [json.loads(line) for line in (voted / "votes.jsonl").read_text().splitlines()]
    assert sorted(line["winner"] for line in lines) == ["a"] + ["b"] * 12 + ["tie"]
    found = compare.votes(lines)
    assert (found.n, found.better, found.apart) == (14, "b", True)
    assert cli.main(["arena", "beta.jsonl", "alpha.jsonl", "--export-votes=votes.jsonl"]) == 0
    lines = [json.loads(line) for line in (voted / "votes.jsonl").read_text().splitlines()]
    assert compare.votes(lines).better == "a"


def test_pairs_are_read_for_dpo(voted, capsys):
    assert cli.main(["arena", "--export-pairs=pairs.jsonl"]) == 0
    pairs = [*examples.read("pairs.jsonl", "auto", pairs=True)]
    assert len(pairs) == 13
    for pair in pairs:
        number = int(pair.prompt[-1]["content"].split()[1].rstrip("?"))
        better, worse = ("alpha", "beta") if number == 0 else ("beta", "alpha")
        assert pair.prompt == ({"role": "user", "content": f"question {number}?"},)
        assert [side[-1]["content"] for side in (pair.chosen, pair.rejected)] == [
            f"{better} {number}",
            f"{worse} {number}",
        ]


def test_several_raters_make_one_pair_and_an_empty_side_none(tmp_path):
    sides = [("ann", "first"), ("ben", "first"), ("cat", "second")]
    votes = [Vote(rater, "p", 1, 2, "x", "y", 1, winner) for rater, winner in sides]
    votes += [Vote("ann", "q", 1, 2, "x", " ", 1, "first")]
    votes += [Vote(rater, "r", 1, 2, "x", "y", 1, winner) for rater, winner in sides[1:]]
    assert write_pairs(tmp_path / "pairs.jsonl", votes) == 1
    assert json.loads((tmp_path / "pairs.jsonl").read_text()) == {"prompt": "p", "chosen": "x", "rejected": "y"}


def test_results_in_words_and_as_json(voted, capsys):
    assert cli.main(["arena", "--results"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("14 votes by 1 person, 1 tie\n")
    assert "beta is better than alpha: it would win" in out
    assert cli.main(["arena", "--results", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in found["ratings"]] == ["beta", "alpha"]
    assert found["gaps"][0]["apart"] is True
    assert found["agreement"] is None


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--results", "--store=none.sqlite"], "no votes in none.sqlite: jaxlm arena RUN_A RUN_B begins"),
        (["alpha.jsonl", "--results"], "one contestant alone: name two or more"),
        (["alpha.jsonl", "alpha.jsonl"], "takes part twice"),
        (["alpha.jsonl", "nothing"], "nothing is no run, no model, no file of samples and no URL"),
        (["alpha.jsonl", "beta.jsonl", "--json"], "--json prints results"),
        (["alpha.jsonl", "beta.jsonl", "--prot=1"], "did you mean --port?"),
        (
            ["alpha.jsonl", "votes.jsonl", "--port=0"],
            'votes.jsonl:1 is no sample: it must be {"prompt": "...", "text": "..."}',
        ),
        (["alpha.jsonl", "copy.jsonl", "--port=0"], "nothing to vote on: no prompt has two answers that differ"),
    ],
)
def test_what_is_refused(voted, capsys, words, line):
    (voted / "votes.jsonl").write_text('{"winner": "a"}\n')
    (voted / "copy.jsonl").write_text((voted / "alpha.jsonl").read_text())
    store = [] if any("store" in word for word in words) else ["--store=new.sqlite" if "--results" not in words else ""]
    assert cli.main(["arena", *words, *filter(None, store)]) == 2
    assert line in (err := capsys.readouterr().err)
    assert err.count("\n") == 1
