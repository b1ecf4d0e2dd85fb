"""The arena's file, who takes part, and what it writes: each battle once for each rater; votes and pairs are read elsewhere."""

import collections
import json
import random
import resource
import socket
import sqlite3
import threading

import pytest

from jaxlm import config
from jaxlm.cli import cli
from jaxlm.config import ConfigError, RunError, config_files
from jaxlm.data.chats import examples
from jaxlm.eval import compare
from jaxlm.serve.arena import contestants
from jaxlm.serve.arena.contestants import Contestant, names, parse
from jaxlm.serve.arena.store import CHOICES, LEFT, RIGHT, SKIP, Store, Vote, write_pairs

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


def settings(**keys):
    overrides = [f"sample.{key}={value}" for key, value in keys.items()]
    return config.resolve(config_files.load("quickstart", overrides)).sample


def test_a_word_names_a_run_a_server_or_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run/samples").mkdir(parents=True)
    (tmp_path / "run/samples/100.jsonl").touch()
    (tmp_path / "odd@7").mkdir()
    assert parse("run") == Contestant("run", "run", "latest")
    assert parse("run@100") == Contestant("run", "run", "100")
    assert parse("run@best").which == "best"
    assert parse("odd@7") == Contestant("run", "odd@7", "latest")
    assert parse("http://localhost:8000") == Contestant("server", "http://localhost:8000/v1")
    assert parse("https://host/v1/#some/model") == Contestant("server", "https://host/v1", "some/model")
    file = parse("run/samples/100.jsonl")
    assert (file.kind, file.name) == ("file", "run 100")
    assert [*names([parse("run@1"), parse("run@2")]).values()] == ["run@1", "run@2"]
    other = names([Contestant("run", "a/run", "1"), Contestant("run", "b/run", "1")])
    assert all(key == name for key, name in other.items())
    with pytest.raises(ConfigError, match="twice"):
        names([parse("run@1"), parse("./run@1")])


def test_files_of_prompts_and_samples(tmp_path):
    (tmp_path / "p.txt").write_text("one\n\ntwo\none\n")
    (tmp_path / "p.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two\\nlines"}\n')
    (tmp_path / "bad.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "s.jsonl").write_text('{"prompt": "p", "text": "first"}\n{"prompt": "p", "text": "second"}\n')
    assert contestants.read_prompts(str(tmp_path / "p.txt")) == ["one", "two"]
    assert contestants.read_prompts(str(tmp_path / "p.jsonl")) == ["one", "two\nlines"]
    assert contestants.read_samples(str(tmp_path / "s.jsonl")) == {"p": "first"}
    for name in ("bad.jsonl", "none.txt"):
        with pytest.raises(ConfigError, match=name):
            contestants.read_prompts(str(tmp_path / name))


def test_a_server_is_asked_as_a_model_or_as_a_chat(httpserver):
    httpserver.expect_request("/v1/models").respond_with_json({"data": [{"id": "its-model"}]})
    httpserver.expect_request("/v1/completions").respond_with_json({"choices": [{"text": " goes on"}]})
    httpserver.expect_request("/v1/chat/completions").respond_with_json({"choices": [{"message": {"content": "hi"}}]})
    server = parse(httpserver.url_for(""))
    assert contestants.ask(server, "it", settings(max_new_tokens=7), 3) == " goes on"
    asked = json.loads(httpserver.log[-1][0].data)
    assert (asked["model"], asked["prompt"], asked["max_tokens"], asked["seed"]) == ("its-model", "it", 7, 3)
    assert asked["top_k"] == settings().top_k > 0  # as a run draws
    assert contestants.ask(parse(f"{httpserver.url_for('')}#m"), "it", settings(chat_template=True, top_k=0), 3) == "hi"
    asked = json.loads(httpserver.log[-1][0].data)
    assert (asked["model"], asked["messages"]) == ("m", [{"role": "user", "content": "it"}])
    assert "top_k" not in asked


def test_a_server_that_fails_is_one_line(httpserver):
    httpserver.expect_request("/v1/completions").respond_with_data("no template", status=400)
    with pytest.raises(RunError, match="answers 400: no template"):
        contestants.ask(parse(f"{httpserver.url_for('')}#m"), "it", settings(), 0)
    with socket.create_server(("127.0.0.1", 0)) as half:  # an answer that breaks off

        def answer() -> None:
            client, _ = half.accept()
            with client:
                client.recv(1000)
                client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")

        threading.Thread(target=answer).start()
        with pytest.raises(RunError, match="can't be asked"):
            contestants.ask(parse(f"http://127.0.0.1:{half.getsockname()[1]}#m"), "it", settings(), 0)
    with pytest.raises(RunError, match="can't be asked"):
        contestants.ask(parse("http://127.0.0.1:9#m"), "it", settings(), 0)


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
        (["--results", "--store=empty.sqlite"], "no votes yet: jaxlm arena RUN_A RUN_B opens the page"),
        (["alpha.jsonl", "--results"], "one contestant alone: name two or more"),
        (["alpha.jsonl", "alpha.jsonl"], "takes part twice"),
        (["alpha.jsonl", "nothing"], "nothing is no run, no model, no file of samples and no URL"),
        (["alpha.jsonl", "beta.jsonl", "--json"], "--json needs --results"),
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
    Store(voted / "empty.sqlite").close()
    (voted / "copy.jsonl").write_text((voted / "alpha.jsonl").read_text())
    store = [] if any("store" in word for word in words) else ["--store=new.sqlite" if "--results" not in words else ""]
    assert cli.main(["arena", *words, *filter(None, store)]) == 2
    assert line in (err := capsys.readouterr().err)
    assert err.count("\n") == 1
