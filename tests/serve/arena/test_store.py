"""The arena's file: each battle once for each rater, evenly chosen; what comes twice counts once; a restart goes on."""

import collections
import random
import resource
import sqlite3
import threading

import pytest

from jaxlm.config import ConfigError, RunError
from jaxlm.serve.arena.store import CHOICES, LEFT, RIGHT, SKIP, Store

NAMES = {"key one": "alpha", "key two": "beta", "key three": "gamma"}


def filled(path, prompts: int = 6, names=NAMES) -> Store:
    store = Store(path)
    for at, number in enumerate(store.enter(names)):
        store.answer(number, {f"prompt {n}": f"answer {at} to {n}" for n in range(prompts)})
    return store


def test_a_vote_that_cannot_be_written_is_an_error_and_can_be_given_again(tmp_path):
    store = filled(tmp_path / "a.sqlite")
    ballot = store.ballot("ann")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
    try:
        with pytest.raises(RunError, match=r"a\.sqlite can't be written"):
            store.vote(ballot.token, "ann", LEFT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store.vote(ballot.token, "ann", LEFT)
    assert len(store.votes()) == 1


def test_a_rater_judges_every_battle_once(tmp_path):
    store, seen = filled(tmp_path / "a.sqlite"), set()
    while ballot := store.ballot("ann"):
        seen.add((ballot.prompt, frozenset((ballot.left, ballot.right))))
        assert store.progress("ann") == (len(seen) - 1, 18)
        assert store.vote(ballot.token, "ann", LEFT)
    assert len(seen) == 18 == store.progress("ann")[0] == len(store.votes())
    assert store.progress("ben") == (0, 18)
    assert store.ballot("ben")


def test_a_reload_shows_the_same_and_what_comes_twice_counts_once(tmp_path):
    store = filled(tmp_path / "a.sqlite")
    ballot = store.ballot("ann")
    assert all(store.ballot("ann") == ballot for _ in range(20))
    assert store.revealed(ballot.token) is None
    assert not store.vote(ballot.token, "ben", LEFT)
    assert not store.vote("no such token", "ann", LEFT)
    assert [store.vote(ballot.token, "ann", choice) for choice in (LEFT, LEFT, RIGHT)] == [True, False, False]
    (vote,) = store.votes()
    winner = vote.first_text if vote.winner == "first" else vote.second_text
    assert winner == ballot.left
    assert store.ballot("ann").token != ballot.token
    with pytest.raises(ValueError, match="no choice"):
        store.vote(ballot.token, "ann", "alpha")


def test_clicks_at_the_same_time_count_once(tmp_path):
    store = filled(tmp_path / "a.sqlite")
    ballot, counted = store.ballot("ann"), []
    clicks = [threading.Thread(target=lambda: counted.append(store.vote(ballot.token, "ann", LEFT))) for _ in range(16)]
    for click in clicks:
        click.start()
    for click in clicks:
        click.join()
    assert sorted(counted) == [False] * 15 + [True]


def test_a_restart_goes_on(tmp_path):
    store = filled(tmp_path / "a.sqlite")
    store.welcome("browser", "ann")
    open_ballot, secret = store.ballot("ann"), store.secret()
    store.close()
    again = filled(tmp_path / "a.sqlite")
    assert (again.ballot("ann"), again.secret(), again.rater("browser")) == (open_ballot, secret, "ann")
    assert again.enter_all() == again.enter(NAMES)
    again.answer(1, {"prompt 0": "another text", "prompt 9": "new"})
    assert again.missing(1, ["prompt 0", "prompt 9", "prompt 10", "prompt 10"]) == ["prompt 10"]
    assert "another text" not in {text for vote in again.votes() for text in vote} | {open_ballot.left}


def test_battles_are_judged_evenly_and_skips_are_given_to_others(tmp_path):
    store, pairs = filled(tmp_path / "a.sqlite", prompts=10), collections.Counter()
    for n in range(60):
        rater = f"rater {n % 7}"
        ballot = store.ballot(rater)
        store.vote(ballot.token, rater, SKIP if n % 7 == 0 else LEFT)
    for vote in store.votes():
        pairs[vote.first, vote.second] += 1
    assert len(pairs) == 3
    assert max(pairs.values()) - min(pairs.values()) <= 1
    judged = collections.Counter((vote.prompt, vote.first, vote.second) for vote in store.votes())
    assert max(judged.values()) - min(judged.get(key, 0) for key in judged) <= 1
    assert len(store.votes()) == 60 - 9


def test_the_side_says_nothing_and_is_drawn_for_each_rater(tmp_path):
    store, left = filled(tmp_path / "a.sqlite", prompts=40, names={"a": "a", "b": "b"}), collections.Counter()
    by_prompt = collections.defaultdict(set)
    for rater in ("ann", "ben", "cat", "dan"):
        while ballot := store.ballot(rater):
            left[ballot.left.split()[1]] += 1
            by_prompt[ballot.prompt].add(ballot.left)
            store.vote(ballot.token, rater, "both good")
    assert 50 < left["0"] < 110  # of 160: chance leaves this in fewer than one of 10^5 cases
    assert sum(len(sides) == 2 for sides in by_prompt.values()) > 25


def test_what_a_vote_means_on_either_side(tmp_path):
    store, random_choice = filled(tmp_path / "a.sqlite", prompts=30), random.Random(0)
    said = {}
    while ballot := store.ballot("ann"):
        choice = random_choice.choice(CHOICES)
        store.vote(ballot.token, "ann", choice)
        names = store.revealed(ballot.token)
        assert [NAMES[key] for key in NAMES].index(names[0]) == int(ballot.left.split()[1])
        won = {LEFT: ballot.left, RIGHT: ballot.right}.get(choice)
        said[ballot.prompt, frozenset((ballot.left, ballot.right))] = (choice, won, ballot.left)
    votes = store.votes()
    assert len(votes) == sum(choice != SKIP for choice, *_ in said.values())
    for vote in votes:
        texts = {vote.first: vote.first_text, vote.second: vote.second_text}
        choice, won, left = said[vote.prompt, frozenset(texts.values())]
        assert {"first": vote.first_text, "second": vote.second_text, "tie": None}[vote.winner] == won
        assert texts[vote.left] == left


def test_equal_answers_and_absent_contestants_make_no_battle(tmp_path):
    store = filled(tmp_path / "a.sqlite", prompts=1)
    one, two, _ = store.enter(NAMES)
    store.answer(one, {"same": "text", "alone": "text"})
    store.answer(two, {"same": " text\n".strip()})
    assert store.battles() == 3
    store.enter({"key one": "alpha", "key two": "beta"})
    assert store.battles() == 1
    assert [*store.names().values()] == ["alpha", "beta"]


def test_a_file_that_is_no_arena_is_refused(tmp_path):
    (tmp_path / "text.sqlite").write_text("no database, but long enough to be looked at" * 40)
    with pytest.raises(ConfigError, match="can't be used"):
        Store(tmp_path / "text.sqlite")
    other = sqlite3.connect(tmp_path / "other.sqlite")
    other.execute("CREATE TABLE x (y)")
    other.close()
    with pytest.raises(ConfigError, match="no arena's file"):
        Store(tmp_path / "other.sqlite")
