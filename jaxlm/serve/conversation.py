"""A conversation with one model: its turns, what of them the model reads, and its answers as they come."""

import dataclasses
import queue
import time
import typing
from collections.abc import Iterator, Sequence

from jaxlm.config import ConfigError, SampleConfig
from jaxlm.data.chats import chat
from jaxlm.data.tokenizer.coder import Coder, Text
from jaxlm.data.tokenizer.ids import document
from jaxlm.serve.batcher import Ask, Batcher, Update


class Turn(typing.NamedTuple):
    """A message and its answer; `cut` if that was ended early: by its length, or by the user."""

    asked: str
    answer: str
    cut: bool = False


class Conversation:
    """The turns of a conversation, as a model reads them: in its chat template, or as one text that goes on.

    Args:
      tokenizer: the model's tokenizer.
      ends: the ids that end an answer.
      context: the most tokens of a conversation and its next answer together.
      plain: True for plain text: each message begins a line, and the model goes on with it.

    Attributes:
      turns: all turns.
      system: what the system says, "" for nothing.
      forgotten: how many of the oldest turns the model reads no more.
    """

    def __init__(self, tokenizer: Coder, ends: tuple[int, ...], context: int, plain: bool):
        self.tokenizer, self.ends, self.context, self.plain = tokenizer, ends, context, plain
        self.turns: list[Turn] = []
        self.system, self.forgotten = "", 0

    def ids(self, message: str, new: int) -> tuple[int, ...]:
        """Returns what the model reads to answer a message. The oldest turns go where they leave no room for the answer.

        Args:
          message: the message, which is no turn yet.
          new: how many tokens the answer may have; room is kept for so many, or for half of the context.

        Raises:
          ConfigError: the message alone is too long, or the model's template refuses the conversation.
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
        """Takes the last turn away and returns it. The model may read older ones again."""
        self.forgotten = 0
        return self.turns.pop()

    def reset(self) -> None:
        """Forgets all turns; what the system says stays."""
        self.turns.clear()
        self.forgotten = 0

    def messages(self, turns: Sequence[Turn]) -> list[dict[str, str]]:
        """Returns the messages of some of the turns, `role` and `content` of each, the system's in front."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for asked, answer, _ in turns:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        return messages

    def _ids(self, first: int, message: str) -> list[int]:
        if self.plain:
            lines = [asked + answer for asked, answer, _ in self.turns[first:]]
            return document(self.tokenizer, "\n".join([*lines, message]))
        return chat.ids(self.tokenizer, [*self.messages(self.turns[first:]), {"role": "user", "content": message}])


@dataclasses.dataclass(frozen=True)
class Voice:
    """A model that one talks to.

    Attributes:
      name: what it is called.
      batcher: answers with the model.
      talk: the conversation with it.
    """

    name: str
    batcher: Batcher
    talk: Conversation


class Reply:
    """A voice's answer to a message, under way.

    Attributes:
      text: what has come of it.
      ended: how it ended: "stop", "length", "cancelled", "failed"; "" while it goes on.
      why: why it failed.
      read: tokens of the prompt.
      cached: how many of these were in the cache of prefixes; known at the end.
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
        drawing = (settings.temperature, settings.top_k, settings.top_p, seed)
        self._ticket = voice.batcher.submit(Ask(ids, settings.max_new_tokens, *drawing, stop_ids=talk.ends), hear)

    def cancel(self) -> None:
        self._ticket.cancel()

    def take(self, update: Update) -> str:
        """Returns the text that is new with an update of the batcher. At the end the conversation has one more turn."""
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
        """Returns tokens a second after the first one; 0 if there is no more than that."""
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
