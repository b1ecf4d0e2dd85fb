"""Keeps an arena in one sqlite file: contestants, their answers, the ballots that raters were shown, and the votes.

A battle is a prompt with the answers of two contestants. A ballot is a battle as one rater sees it: its token is random, and
its sides are drawn once. So the page needs only the token, and a vote that comes twice counts once.
"""

import collections
import contextlib
import json
import pathlib
import secrets
import sqlite3
import threading
import time
import typing
from collections.abc import Iterator, Mapping, Sequence

from jaxlm.config import ConfigError, RunError
from jaxlm.host import files

LEFT, RIGHT, BOTH_GOOD, BOTH_BAD, SKIP = "left", "right", "both good", "both bad", "skip"
CHOICES = (LEFT, RIGHT, BOTH_GOOD, BOTH_BAD, SKIP)
_VERSION = 1
_TABLES = """
CREATE TABLE contestants (id INTEGER PRIMARY KEY, key TEXT UNIQUE NOT NULL, name TEXT NOT NULL);
CREATE TABLE prompts (id INTEGER PRIMARY KEY, text TEXT UNIQUE NOT NULL);
CREATE TABLE answers (prompt INTEGER REFERENCES prompts, contestant INTEGER REFERENCES contestants, text TEXT NOT NULL,
  PRIMARY KEY (prompt, contestant));
CREATE TABLE browsers (id TEXT PRIMARY KEY, rater TEXT NOT NULL);
CREATE TABLE ballots (token TEXT PRIMARY KEY, rater TEXT NOT NULL, prompt INTEGER NOT NULL, first INTEGER NOT NULL,
  second INTEGER NOT NULL, flipped INTEGER NOT NULL, choice TEXT, voted REAL, UNIQUE (rater, prompt, first, second));
CREATE TABLE secrets (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
# Battles of the contestants that take part, once each. Two equal answers can't be told apart, so they are no battle.
_BATTLES = """
SELECT x.prompt AS prompt, x.contestant AS first, y.contestant AS second
FROM answers x JOIN answers y ON x.prompt = y.prompt AND x.contestant < y.contestant AND trim(x.text) != trim(y.text)
WHERE x.contestant IN ({ids}) AND y.contestant IN ({ids})
"""
# The least judged pair of contestants, of this pair the least judged prompt; then by chance. Open ballots count as judged, so
# that raters at the same time get different battles.
_NEXT = """
WITH battles AS ({battles}), judged AS (SELECT * FROM ballots WHERE choice IS NULL OR choice != 'skip')
SELECT prompt, first, second FROM battles
WHERE NOT EXISTS (SELECT 1 FROM ballots o WHERE o.rater = :rater AND o.prompt = battles.prompt
  AND o.first = battles.first AND o.second = battles.second)
ORDER BY (SELECT count(*) FROM judged j WHERE j.first = battles.first AND j.second = battles.second),
  (SELECT count(*) FROM judged j WHERE j.first = battles.first AND j.second = battles.second AND j.prompt = battles.prompt),
  random() LIMIT 1
"""


class Ballot(typing.NamedTuple):
    """What a rater sees before the vote: nothing here says whose an answer is."""

    token: str
    prompt: str
    left: str
    right: str


class Vote(typing.NamedTuple):
    """A vote that counts: `winner` is "first", "second" or "tie"; `left` is the contestant that was shown on the left."""

    rater: str
    prompt: str
    first: int
    second: int
    first_text: str
    second_text: str
    left: int
    winner: str


class Store:
    """An arena's file. Its methods may be called from any thread.

    Raises ConfigError if the file exists and is no arena.
    """

    def __init__(self, path: pathlib.Path):
        self._path, self._lock, self._playing = path, threading.Lock(), ()
        try:
            self._db = sqlite3.connect(path, check_same_thread=False, timeout=30, isolation_level=None)
            self._db.execute("PRAGMA journal_mode = WAL")
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            empty = not self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if version != _VERSION and not empty:
                raise ConfigError(f"{path} is no arena's file of this version: give another one by --store=FILE")
            if empty:
                self._db.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = {_VERSION}; COMMIT;")
        except sqlite3.Error as error:
            raise ConfigError(f"--store={path} can't be used: {error}") from None

    def close(self) -> None:
        self._db.close()

    def enter(self, contestants: Mapping[str, str]) -> list[int]:
        """Adds contestants (key -> the name that people see) and returns their ids; from now on only these take part."""
        with self._writing():
            for key, name in contestants.items():
                sql = "INSERT INTO contestants (key, name) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET name = excluded.name"
                self._db.execute(sql, (key, name))
            ids = {key: number for number, key in self._db.execute("SELECT id, key FROM contestants")}
        self._playing = tuple(ids[key] for key in contestants)
        return [*self._playing]

    def enter_all(self) -> list[int]:
        self._playing = tuple(row[0] for row in self._all("SELECT id FROM contestants ORDER BY id"))
        return [*self._playing]

    def names(self) -> dict[int, str]:
        names = dict(self._all("SELECT id, name FROM contestants"))
        return {number: names[number] for number in self._playing}

    def missing(self, contestant: int, prompts: Sequence[str]) -> list[str]:
        """Returns the prompts that a contestant has not answered yet, each once."""
        sql = "SELECT p.text FROM answers a JOIN prompts p ON p.id = a.prompt WHERE a.contestant = ?"
        there = {row[0] for row in self._all(sql, contestant)}
        return [prompt for prompt in dict.fromkeys(prompts) if prompt not in there]

    def prompts(self) -> list[str]:
        return [row[0] for row in self._all("SELECT text FROM prompts ORDER BY id")]

    def answer(self, contestant: int, texts: Mapping[str, str]) -> None:
        """Stores answers (prompt -> text). An earlier answer stays: people may have judged it."""
        with self._writing():
            for prompt, text in texts.items():
                self._db.execute("INSERT OR IGNORE INTO prompts (text) VALUES (?)", (prompt,))
                sql = "INSERT OR IGNORE INTO answers SELECT id, ?, ? FROM prompts WHERE text = ?"
                self._db.execute(sql, (contestant, text, prompt))

    def secret(self) -> str:
        """Returns the secret that signs cookies: drawn once, so that raters are recognised after a restart."""
        with self._writing():
            self._db.execute("INSERT OR IGNORE INTO secrets VALUES ('cookie', ?)", (secrets.token_hex(32),))
        return self._all("SELECT value FROM secrets WHERE name = 'cookie'")[0][0]

    def rater(self, browser: str) -> str | None:
        return next((row[0] for row in self._all("SELECT rater FROM browsers WHERE id = ?", browser)), None)

    def welcome(self, browser: str, rater: str) -> None:
        with self._writing():
            self._db.execute("INSERT OR REPLACE INTO browsers VALUES (?, ?)", (browser, rater))

    def ballot(self, rater: str) -> Ballot | None:
        """Returns a rater's open ballot, or if there is none, a new one; None if the rater has judged all battles."""
        battles = self._battles()
        with self._writing():
            sql = f"""SELECT o.token FROM ballots o JOIN ({battles}) b USING (prompt, first, second)
                WHERE o.rater = ? AND o.choice IS NULL"""
            token = self._db.execute(sql, (rater,)).fetchone()
            if not token:
                battle = self._db.execute(_NEXT.format(battles=battles), {"rater": rater}).fetchone()
                if not battle:
                    return None
                token = (secrets.token_urlsafe(16),)
                row = (*token, rater, *battle, secrets.randbelow(2))
                columns = "token, rater, prompt, first, second, flipped"
                self._db.execute(f"INSERT INTO ballots ({columns}) VALUES (?, ?, ?, ?, ?, ?)", row)
            sql = """SELECT p.text, x.text, y.text, o.flipped FROM ballots o JOIN prompts p ON p.id = o.prompt
                JOIN answers x ON x.prompt = p.id AND x.contestant = o.first
                JOIN answers y ON y.prompt = p.id AND y.contestant = o.second WHERE o.token = ?"""
            prompt, first, second, flipped = self._db.execute(sql, token).fetchone()
        return Ballot(token[0], prompt, *((second, first) if flipped else (first, second)))

    def vote(self, token: str, rater: str, choice: str) -> bool:
        """Counts a vote; returns False if this ballot has a vote already, or is not this rater's."""
        if choice not in CHOICES:
            raise ValueError(f"{choice!r} is no choice")
        with self._writing():
            sql = "UPDATE ballots SET choice = ?, voted = ? WHERE token = ? AND rater = ? AND choice IS NULL"
            return self._db.execute(sql, (choice, time.time(), token, rater)).rowcount == 1

    def revealed(self, token: str) -> tuple[str, str] | None:
        """Returns the names of the left and the right side of a ballot; None before its vote."""
        sql = """SELECT x.name, y.name, o.flipped FROM ballots o JOIN contestants x ON x.id = o.first
            JOIN contestants y ON y.id = o.second WHERE o.token = ? AND o.choice IS NOT NULL"""
        for first, second, flipped in self._all(sql, token):
            return (second, first) if flipped else (first, second)
        return None

    def battles(self) -> int:
        return self._all(f"SELECT count(*) FROM ({self._battles()})")[0][0]

    def progress(self, rater: str) -> tuple[int, int]:
        """Returns (the number of battles that a rater has judged or skipped, the number of all battles)."""
        sql = f"SELECT count(o.choice), count(*) FROM ({self._battles()}) b LEFT JOIN ballots o ON o.rater = ? AND "
        on = "o.prompt = b.prompt AND o.first = b.first AND o.second = b.second"
        return self._all(sql + on, rater)[0]

    def votes(self) -> list[Vote]:
        """Returns the votes on the contestants that take part, oldest first, without skipped ballots."""
        playing = self._playing
        sql = """SELECT o.rater, p.text, o.first, o.second, x.text, y.text, o.flipped, o.choice FROM ballots o
            JOIN prompts p ON p.id = o.prompt JOIN answers x ON x.prompt = p.id AND x.contestant = o.first
            JOIN answers y ON y.prompt = p.id AND y.contestant = o.second
            WHERE o.choice IS NOT NULL AND o.choice != 'skip' ORDER BY o.voted, o.rowid"""
        rows = [row for row in self._all(sql) if row[2] in playing and row[3] in playing]
        return [Vote(*row[:6], row[3] if row[6] else row[2], _winner(row[7], row[6])) for row in rows]

    def _battles(self) -> str:
        return _BATTLES.format(ids=", ".join(map(str, self._playing)))

    def _all(self, sql: str, *values: object) -> list[tuple]:
        with self._lock:
            return self._db.execute(sql, values).fetchall()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Makes the `with` block a transaction, exclusive among threads and processes. Raises RunError if sqlite fails."""
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield
                self._db.execute("COMMIT")
            except sqlite3.Error as error:
                raise RunError(f"{self._path} can't be written: {error}") from None
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")


def _winner(choice: str, flipped: int) -> str:
    if choice not in (LEFT, RIGHT):
        return "tie"
    return "second" if (choice == RIGHT) != bool(flipped) else "first"


def write_votes(path: pathlib.Path, votes: Sequence[Vote], names: Mapping[int, str]) -> int:
    """Writes a line {"winner": "a", "b" or "tie", "item": the prompt, "rater"} for each vote; returns their number.

    A is the first of `names`. Raises ConfigError unless two contestants are named.
    """
    if len(names) != 2:
        raise ConfigError(
            f"--export-votes is of two contestants, not of {len(names)}: jaxlm arena A B --export-votes=FILE"
        )
    sides = dict(zip(names, "ab", strict=True))
    winners = (sides.get({"first": v.first, "second": v.second}.get(v.winner), "tie") for v in votes)
    voted = zip(winners, votes, strict=True)
    return _write(path, [{"winner": side, "item": vote.prompt, "rater": vote.rater} for side, vote in voted])


def write_pairs(path: pathlib.Path, votes: Sequence[Vote]) -> int:
    """Writes a line {"prompt", "chosen", "rejected"} for each battle that one side won by most votes; returns their number.

    Battles in which a side is empty are left out: there is nothing to learn from.
    """
    ahead: dict[tuple[str, str, str], int] = collections.defaultdict(int)
    for vote in votes:
        ahead[vote.prompt, vote.first_text, vote.second_text] += {"first": 1, "second": -1, "tie": 0}[vote.winner]
    lines = []
    for (prompt, first, second), lead in ahead.items():
        if lead and first.strip() and second.strip():
            chosen, rejected = (first, second) if lead > 0 else (second, first)
            lines.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return _write(path, lines)


def _write(path: pathlib.Path, lines: Sequence[dict]) -> int:
    content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    files.write_atomically(path, content.encode())
    return len(lines)
