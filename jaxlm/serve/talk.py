"""A talk with one or several models in a terminal or a file: messages, and commands that begin with /."""

import contextlib
import dataclasses
import difflib
import json
import math
import pathlib
import queue
import sys
import time
import typing
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence

from jaxlm.config import ConfigError, SampleConfig
from jaxlm.data.chats import chat
from jaxlm.data.tokenizer.coder import Coder
from jaxlm.data.tokenizer.ids import document
from jaxlm.data.tokenizer.stop_strings import Text
from jaxlm.host import interrupts, screen
from jaxlm.host.screen import BOLD, CYAN, DIM
from jaxlm.models.decode.schedule import Ask, Update
from jaxlm.serve.batcher import Batcher

_HELP = {
    "/reset": "start a new conversation; the system message stays",
    "/undo": "take the last message and its answers back",
    "/system TEXT": "set the system message; without TEXT, remove it",
    "/temperature X": "0 = the likeliest token; without X, show it",
    "/save FILE": "append the conversation to FILE, which `jaxlm train sft` reads",
    "/stats": "tokens, time to the first one and tokens/s of the last answers",
    "/help": "this",
    "/quit": "leave, as ctrl-D does; // begins a message with /",
}

COLUMN = 56  # of a terminal, at least, for each of several answers side by side
_GAP = "  │  "
_RESET = "\x1b[0m"


def safe(text: str) -> str:
    """Returns a text without characters that control a terminal: only tabs and newlines are left."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def width(text: str) -> int:
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.category(c) in ("Mn", "Me", "Cf") for c in text)


def wrapped(text: str, columns: int) -> list[str]:
    """Returns a text as lines of at most `columns` columns. Appended text changes only the last line, and adds lines."""
    lines = []
    for line in text.expandtabs(4).split("\n"):
        lines.append("")
        for number, word in enumerate(line.split(" ")):
            joined = f"{lines[-1]} {word}" if number else word
            if width(joined) <= columns:
                lines[-1] = joined
                continue
            if number:
                lines.append("")
            for c in word:
                if width(lines[-1] + c) > columns:
                    lines.append("")
                lines[-1] += c
    return lines


class Terminal:
    """Writes to standard output, coloured if it is a terminal; unless `live`, notes go to standard error.

    `live` is True if somebody types and reads: standard input and output are terminals.
    """

    def __init__(self):
        self.live = screen.is_terminal(sys.stdin) and screen.is_terminal(sys.stdout)
        self._colour = screen.has_colour(sys.stdout)

    def lines(self) -> Iterator[str]:
        """Yields the lines that a user types, up to ctrl-D or a second ctrl-C; unless `live`, all non-blank input lines."""
        sys.stdin.reconfigure(errors="replace")
        if not self.live:
            yield from (line for line in sys.stdin if line.strip())
            return
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (line editing, and the arrow keys' history)
        self.note("/help lists the commands; ctrl-C stops an answer, ctrl-D leaves")
        # \x01 and \x02 tell Readline what takes no columns.
        prompt = f"\x01{BOLD}{CYAN}\x02> \x01{_RESET}\x02" if self._colour else "> "
        interrupted = False
        while True:
            try:
                line = input(prompt)
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print()
                if interrupted:
                    return
                interrupted = True
                self.note("ctrl-C again or ctrl-D leaves")
                continue
            interrupted = False
            yield line

    def note(self, text: str) -> None:
        if self.live:
            for line in wrapped(safe(text), screen.columns(sys.stdout)):
                print(self._style(line, DIM), flush=True)
        else:
            screen.say(text)

    def heading(self, name: str) -> None:
        print(self._style(f"{name}:", CYAN), flush=True)

    def piece(self, text: str) -> None:
        print(safe(text) if screen.is_terminal(sys.stdout) else text, end="", flush=True)

    def room(self, answers: int) -> int:
        """Returns how wide each of several answers side by side may be; 0 if there is no room, or unless `live`."""
        if not self.live or answers < 2:
            return 0
        each = (screen.columns(sys.stdout) - (answers - 1) * len(_GAP)) // answers
        return each if each >= COLUMN else 0

    def _style(self, text: str, style: str) -> str:
        return f"{style}{text}{_RESET}" if self._colour and style else text

    def beside(
        self, names: Sequence[str], each: int, pieces: Iterable[tuple[int, str]], ended: Callable[[int], bool]
    ) -> None:
        """Shows answers side by side, `each` columns wide, row by row: a row is written once it is complete in all answers."""
        texts, shown = [""] * len(names), 0
        self._row([wrapped(f"{name}:", each)[0] for name in names], each, CYAN)
        for number, piece in pieces:
            texts[number] += safe(piece)
            columns = [wrapped(text, each) for text in texts]
            whole = [len(lines) - 1 for at, lines in enumerate(columns) if not ended(at)]
            sure = min(whole, default=max(map(len, columns)))
            for at in range(shown, sure):
                self._row([lines[at] if at < len(lines) else "" for lines in columns], each)
            shown = max(shown, sure)

    def _row(self, cells: Sequence[str], each: int, style: str = "") -> None:
        padded = [self._style(cell, style) + " " * (each - width(cell)) for cell in cells]
        print(_GAP.join(padded).rstrip(), flush=True)


class Turn(typing.NamedTuple):
    """A message and its answer; `cut`: the answer was ended early, by its length or by the user."""

    asked: str
    answer: str
    cut: bool = False


class Conversation:
    """The turns of a conversation, as a model reads them: in its chat template, or as one text that goes on.

    Attributes:
      ends: the ids that end an answer.
      context: the most tokens of a conversation and its next answer together.
      plain: True for plain text: each message begins a line, and the model continues it.
      system: the system message, "" for none.
      forgotten: how many of the oldest turns the model no longer reads.
    """

    def __init__(self, tokenizer: Coder, ends: tuple[int, ...], context: int, plain: bool):
        self.tokenizer, self.ends, self.context, self.plain = tokenizer, ends, context, plain
        self.turns: list[Turn] = []
        self.system, self.forgotten = "", 0

    def ids(self, message: str, new: int) -> tuple[int, ...]:
        """Returns the ids that the model reads to answer a message. Drops the oldest turns to make room for the answer.

        The room is `new` tokens, but at most half of the context. Raises ConfigError if the message alone is too long, or the
        model's template refuses the conversation.
        """
        room, first = min(new, self.context // 2), self.forgotten
        ids = self._ids(first, message)
        while len(ids) + room > self.context and first < len(self.turns):
            first += 1
            ids = self._ids(first, message)
        if len(ids) >= self.context:
            raise ConfigError(
                f"the message is too long: {len(ids):,} tokens, and the model's context is {self.context:,}; shorten it"
            )

        self.forgotten = first
        return tuple(ids)

    def undo(self) -> Turn:
        self.forgotten = 0
        return self.turns.pop()

    def reset(self) -> None:
        self.turns.clear()
        self.forgotten = 0

    def messages(self, turns: Sequence[Turn]) -> list[dict[str, str]]:
        """Returns the messages of some of the turns, `role` and `content` of each, the system message first."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for message, answer, _ in turns:
            messages += [{"role": "user", "content": message}, {"role": "assistant", "content": answer}]
        return messages

    def _ids(self, first: int, message: str) -> list[int]:
        if self.plain:
            lines = [asked + answer for asked, answer, _ in self.turns[first:]]
            return document(self.tokenizer, "\n".join([*lines, message]))
        return chat.ids(self.tokenizer, [*self.messages(self.turns[first:]), {"role": "user", "content": message}])


@dataclasses.dataclass(frozen=True)
class Voice:
    name: str
    batcher: Batcher
    talk: Conversation
    adapter: int = 0


class Reply:
    """A voice's answer to a message, under way.

    Attributes:
      ended: how it ended: "stop", "length", "cancelled", "failed"; "" while it goes on.
      read: tokens of the prompt.
      cached: how many of the prompt's tokens were in the prefix cache; known at the end.
      tokens: new tokens so far.
      first_s, seconds: from the question to the first token, and to the last one.

    Raises ConfigError if the model can't read the message.
    """

    def __init__(self, voice: Voice, message: str, settings: SampleConfig, seed: int, hear: typing.Callable):
        talk = voice.talk
        self._voice, self._message = voice, message
        before = talk.forgotten
        ids = talk.ids(message, settings.max_new_tokens)
        self.forgot = talk.forgotten - before  # turns, because of this message
        self._shown, self._known = Text(talk.tokenizer), voice.batcher.stats().prefix_tokens
        self.text = self.ended = self.why = ""
        self.read, self.cached, self.tokens = len(ids), 0, 0
        self.first_s = self.seconds = 0.0
        self._began = time.monotonic()
        own = {name: getattr(settings, name) for name in ("temperature", "top_k", "top_p")}
        ask = Ask(ids, settings.max_new_tokens, seed=seed, stop_ids=talk.ends, adapter=voice.adapter, **own)
        self._ticket = voice.batcher.submit(ask, hear)

    def cancel(self) -> None:
        self._ticket.cancel()

    def take(self, update: Update) -> str:
        """Returns the text that an update adds. The last adds a turn, unless the answer was cut before it had text."""
        self.seconds = time.monotonic() - self._began
        if update.tokens and not self.tokens:
            self.first_s = self.seconds
        self.tokens += len(update.tokens)
        new = self._shown.feed(token.id for token in update.tokens)
        new += self._shown.close() if update.ended else ""
        self.text += new
        if update.ended:
            self.ended, self.why = update.ended, update.why
            self.cached = self._voice.batcher.stats().prefix_tokens - self._known
            if self.text or self.ended == "stop":
                self._voice.talk.turns.append(Turn(self._message, self.text, self.ended != "stop"))
        return new

    @property
    def speed(self) -> float:
        took = self.seconds - self.first_s
        return (self.tokens - 1) / took if self.tokens > 1 and took > 0 else 0.0


class Replies:
    """The answers of some voices to one message, all under way at once.

    Iterating yields (number of the voice, a piece of its text) as they come, the last piece of each perhaps empty.

    Raises ConfigError if one of the models can't read the message; then none answers.
    """

    def __init__(self, voices: Sequence[Voice], message: str, settings: SampleConfig, seed: int):
        self._updates: queue.SimpleQueue[tuple[int, Update]] = queue.SimpleQueue()
        self.all: list[Reply] = []
        try:
            for number, voice in enumerate(voices):
                self.all.append(Reply(voice, message, settings, seed, self._hear(number)))
        except ConfigError as error:
            self.cancel()
            raise ConfigError(f"{voice.name}: {error}" if len(voices) > 1 else str(error)) from None

    def __iter__(self) -> Iterator[tuple[int, str]]:
        left = len(self.all)
        while left:
            number, update = self._updates.get()
            piece = self.all[number].take(update)
            left -= bool(update.ended)
            yield number, piece

    def cancel(self) -> None:
        for reply in self.all:
            reply.cancel()

    def _hear(self, number: int) -> typing.Callable[[Update], None]:
        return lambda update: self._updates.put((number, update))


class Talk:
    """Takes lines and answers them.

    Args:
      voices: the models; each hears every message, and has a conversation of its own.
      seed: of the first answer; later ones count up.

    Attributes:
      refused: how many lines could not be answered.
    """

    def __init__(self, voices: Sequence[Voice], settings: SampleConfig, seed: int, terminal: Terminal):
        self._voices, self._settings, self._seed, self._terminal = voices, settings, seed, terminal
        self._last: list[tuple[Voice, Reply]] = []
        self._heard: list[list[Conversation]] = []  # for each message, the conversations in which it became a turn
        self.refused = 0

    def line(self, line: str) -> bool:
        """Answers a message, or executes a command. Returns False if the command is to leave."""
        line = _sound(line).strip()
        try:
            if not line:
                self._terminal.note("nothing was said: type a message, or /help")
            elif line.startswith("/") and not line.startswith("//"):
                word, _, rest = line.partition(" ")
                return self._command(word, rest.strip())
            else:
                self.message(line[1:] if line.startswith("//") else line)
        except ConfigError as error:
            self.refused += 1
            self._terminal.note(str(error))
        return True

    def message(self, message: str) -> None:
        """Lets each voice answer a message. ctrl-C stops the answers; a second one raises KeyboardInterrupt.

        Raises ConfigError if a model can't read it, unless several models answer in turn.
        """
        self._last, self._seed = [], self._seed + 1
        before = [len(voice.talk.turns) for voice in self._voices]
        try:
            if each := self._terminal.room(len(self._voices)):
                self._beside(message, each)
            else:
                self._in_turn(message)
        finally:
            heard = [v.talk for v, turns in zip(self._voices, before, strict=True) if len(v.talk.turns) > turns]
            self._heard += [heard] if heard else []
        for voice, reply in self._last:
            for remark in self._remarks(voice, reply):
                self._note(voice, remark)

    def _note(self, voice: Voice, text: str) -> None:
        self._terminal.note(f"{voice.name}: {text}" if len(self._voices) > 1 else text)

    def _beside(self, message: str, each: int) -> None:
        replies = Replies(self._voices, message, self._settings, self._seed)
        self._last = [*zip(self._voices, replies.all, strict=True)]
        names = [voice.name for voice in self._voices]
        with interrupts.gently(replies.cancel):
            self._terminal.beside(names, each, replies, lambda number: bool(replies.all[number].ended))

    def _in_turn(self, message: str) -> None:
        """Lets the voices answer one after the other, until one is stopped."""
        for voice in self._voices:
            several = len(self._voices) > 1
            try:
                replies = Replies([voice], message, self._settings, self._seed)
            except ConfigError as error:
                if not several:
                    raise
                self.refused += 1
                self._note(voice, str(error))
                continue
            (reply,) = replies.all
            self._last.append((voice, reply))
            if several:
                self._terminal.heading(voice.name)
            with interrupts.gently(replies.cancel):
                for _, piece in replies:
                    self._terminal.piece(piece)
            self._terminal.piece("\n")
            if reply.ended == "cancelled":
                return

    def _remarks(self, voice: Voice, reply: Reply) -> Iterator[str]:
        if reply.forgot:
            turns = f"{reply.forgot} oldest turns" if reply.forgot > 1 else "oldest turn"
            yield f"the context of {voice.talk.context:,} tokens is full: the {turns} were dropped"
        if reply.ended == "length":
            why = "the context is full" if reply.tokens < self._settings.max_new_tokens else "--max-new-tokens"
            yield f"cut after {reply.tokens:,} tokens ({why})"
        elif reply.ended == "cancelled":
            yield "stopped" + ("" if reply.text else " before the first word: the message was not kept")
        elif reply.ended == "failed":
            self.refused += 1
            yield f"no answer: {reply.why}"
        elif not reply.text:
            yield "the answer is empty"

    def _command(self, word: str, rest: str) -> bool:
        commands = {name.partition(" ")[0] for name in _HELP}
        if word not in commands:
            near = difflib.get_close_matches(word, commands, n=1)
            hint = f"did you mean {near[0]}?" if near else "/help lists all, and // begins a message with /"
            raise ConfigError(f"no command {word}; {hint}")
        if word == "/quit":
            return False
        getattr(self, word[1:])(rest)
        return True

    def help(self, _: str = "") -> None:
        for name, what in _HELP.items():
            self._terminal.note(f"{name:<15} {what}")

    def reset(self, _: str) -> None:
        for voice in self._voices:
            voice.talk.reset()
        self._heard.clear()
        self._terminal.note("a new conversation")

    def undo(self, _: str) -> None:
        if not self._heard:
            raise ConfigError("nothing to take back: the conversation is empty")
        gone = [talk.undo() for talk in self._heard.pop()]
        self._terminal.note(f"taken back: {gone[0].asked}")

    def system(self, text: str) -> None:
        if text and all(voice.talk.plain for voice in self._voices):
            raise ConfigError("plain text has no system message")
        for voice in self._voices:
            voice.talk.system = "" if voice.talk.plain else _sound(text)
        self._terminal.note("the system says this from the next message on" if text else "the system says nothing")

    def temperature(self, text: str) -> None:
        if text:
            try:
                value = float(text)
            except ValueError:
                value = math.nan
            if not 0 <= value < math.inf:
                raise ConfigError(f"a temperature is a number, 0 or more, not {text!r}")
            self._settings = dataclasses.replace(self._settings, temperature=value)
        self._terminal.note(f"temperature {self._settings.temperature:g}")

    def save(self, name: str) -> None:
        """Appends the conversations to a file, a line each. Turns without an answer are left out.

        An answer that was cut has `weight: 0`: SFT reads it but does not train on it, since it does not end.
        """
        if not name:
            raise ConfigError("save where? /save FILE.jsonl")
        chats = []
        for talk in (voice.talk for voice in self._voices):
            answered = [turn for turn in talk.turns if turn.answer]
            messages = talk.messages(answered)
            for turn, message in zip(answered, messages[len(messages) % 2 + 1 :: 2], strict=True):
                message |= {"weight": 0} if turn.cut else {}
            chats += [messages] if answered else []
        if not chats:
            raise ConfigError("nothing to save: no message was answered")
        path = pathlib.Path(name).expanduser()
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps({"messages": m}, ensure_ascii=False) + "\n" for m in chats))
        except OSError as error:
            raise ConfigError(f"{path} can't be written: {error.strerror}") from None
        self._terminal.note(f"{len(chats)} conversation{'s' * (len(chats) > 1)} appended to {path}")

    def stats(self, _: str) -> None:
        if not self._last:
            raise ConfigError("no answer yet")
        for voice, reply in self._last:
            speed = f", {reply.speed:,.1f} tokens/s" if reply.speed else ""
            read = f"read {reply.read:,} tokens ({reply.cached:,} from the cache) of {voice.talk.context:,}"
            self._note(voice, f"{reply.tokens:,} tokens{speed}; first one after {reply.first_s:.2f} s; {read}")


def _sound(text: str) -> str:
    """Returns a text in which bytes of a command line that are not UTF-8 are replaced by U+FFFD."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
