"""Turns the body of a request, with OpenAI's keys, into checked requests for the batcher."""

import dataclasses
import functools
import json
import secrets
import typing
from collections.abc import Callable, Mapping, Sequence

from jaxlm.config import ConfigError
from jaxlm.data.chats import chat
from jaxlm.data.chats.records import Absent
from jaxlm.data.tokenizer.coder import Coder
from jaxlm.data.tokenizer.ids import document, opened
from jaxlm.models.decode.schedule import Ask
from jaxlm.serve.body import Fields, Refused, shown
from jaxlm.serve.guide import Guides
from jaxlm.serve.tools import Form, Tools, is_call

COMPLETION_TOKENS = 16  # of a completion without a limit, as OpenAI's
MOST_STOPS, MOST_TOP = 16, 20
MOST_INPUTS = 2048  # of /v1/embeddings, as OpenAI's
# Keys that change nothing in an answer here.
_IGNORED = (
    *("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("reasoning_effort", "verbosity"),
)
_MOST_BYTES = 32  # of a token on the average: a few tokens of some vocabularies are long rows of spaces
_OTHER = {"modalities": (["text"],), "audio": (), "prediction": (), "web_search_options": ()}
_OTHER |= {"functions": ([],), "function_call": ("none", "auto")}  # before tools and tool_choice
_PENALTIES = (("presence", 0.0, -2, 2), ("frequency", 0.0, -2, 2), ("repetition", 1.0, 0.01, 100))  # default, range


class Prompt(typing.NamedTuple):
    """A prompt's ids, with a document's opening ones; `echo` leaves out the first `hidden` ids, which are not the client's."""

    ids: tuple[int, ...]
    hidden: int


@dataclasses.dataclass(frozen=True)
class Request:
    """A checked request.

    Attributes:
      chat: True if it came to /v1/chat/completions.
      asks: the requests for the batcher, `n` for each prompt; all have the same `logprobs` and `echo`.
      include_usage: True if a stream ends with the numbers of tokens.
      form: how calls of tools are written in the answers; None if they have none.
      embeds: "float" or "base64" if vectors are asked for, not answers.
    """

    chat: bool
    prompts: tuple[Prompt, ...]
    asks: tuple[Ask, ...]
    n: int
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    form: Form | None = None
    embeds: str = ""


@dataclasses.dataclass(frozen=True)
class Reader:
    """Reads bodies for one model.

    Attributes:
      context: the most tokens of prompt and answer together.
      ends: the ids that end a text.
      guides: makes the guides that keep answers in the form of `response_format`.
      most_prompt: the most tokens of a prompt; 0: `context`.
      most_answers: the most answers of one request: its prompts times `n`.
      adapter: see `Ask`.
    """

    tokenizer: Coder
    vocab_size: int
    context: int
    ends: tuple[int, ...]
    guides: Guides
    most_prompt: int = 0
    most_answers: int = 256
    adapter: int = 0

    def completion(self, body: Mapping[str, typing.Any]) -> Request:
        """Returns the request of a body of /v1/completions. Raises Refused for a wrong key or value."""
        fields = Fields(body)
        texts = _prompts(fields.required("prompt", "the text to continue"))
        echo = fields.take("echo", bool, False)
        logprobs = fields.number("logprobs", int, None, 0, MOST_TOP)
        limit = fields.number("max_tokens", int, None, 0)
        best_of = fields.number("best_of", int, None, 1)
        n = fields.number("n", int, 1, 1)
        if best_of not in (None, n):
            raise Refused("best_of is not supported: ask for n answers and choose", param="best_of")
        fields.unsupported({"suffix": ("",)})
        self._check_answers(n * len(texts))
        prompts = [self._prompt(text) for text in texts]
        return self._request(fields, prompts, n, limit, {"logprobs": logprobs, "echo": echo})

    def chat(self, body: Mapping[str, typing.Any]) -> Request:
        """Returns the request of a body of /v1/chat/completions. Raises Refused for a wrong key or value."""
        fields = Fields(body)
        messages = _messages(fields.required("messages", "a list of messages, at least one"))
        top = fields.number("top_logprobs", int, None, 0, MOST_TOP)
        logprobs = (top or 0) if fields.take("logprobs", bool, False) else None
        if top is not None and logprobs is None:
            raise Refused("top_logprobs needs logprobs: true", param="top_logprobs")
        newer = fields.number("max_completion_tokens", int, None, 1)
        older = fields.number("max_tokens", int, None, 1)
        n = fields.number("n", int, 1, 1)
        self._check_answers(n)
        fields.unsupported(_OTHER, "this server writes text, and calls of tools")
        tools = Tools(fields, self.tokenizer)
        prompts, limit = [self._conversation(messages, tools.given)], older if newer is None else newer
        return self._request(fields, prompts, n, limit, {"logprobs": logprobs}, tools)

    def embeddings(self, body: Mapping[str, typing.Any]) -> Request:
        """Returns the request of a body of /v1/embeddings. Raises Refused for a wrong key or value."""
        fields = Fields(body)
        texts = _prompts(fields.required("input", "the text to embed"), "input")
        embeds = fields.take("encoding_format", str, "float")
        fields.ignore(("model", "user"))
        fields.unsupported({"dimensions": ()}, "vectors have the model's width")
        fields.end()
        if embeds not in ("float", "base64"):
            raise Refused(f"encoding_format must be float or base64, not {shown(embeds)}", param="encoding_format")
        if len(texts) > MOST_INPUTS or not all(texts):
            raise Refused(f"input must be at most {MOST_INPUTS} texts, none of them empty", param="input")
        prompts = tuple(self._prompt(text, "input") for text in texts)
        for prompt in prompts:
            self._room(prompt, 1)
        asks = tuple(Ask((*prompt.ids, prompt.ids[-1]), 0, pools=True, adapter=self.adapter) for prompt in prompts)
        return Request(False, prompts, asks, 1, (), False, False, embeds=embeds)

    def tokenize(self, body: Mapping[str, typing.Any]) -> tuple[int, ...]:
        """Returns the ids of a body of /tokenize: of `prompt`, or of `messages` as the model reads them. Raises Refused.

        `add_special_tokens` false leaves out a text's opening tokens. A text that is exactly the name of a control token is
        that token: lm-eval asks for the id of EOS this way.
        """
        fields = Fields(body)
        fields.ignore(("model", "add_generation_prompt"))
        whole = fields.take("add_special_tokens", bool, True)
        messages = fields.any("messages")
        text = fields.take("prompt", str)
        fields.end()
        if messages is not None:
            return self._conversation(_messages(messages)).ids
        if text is None:
            raise Refused("prompt is missing: the text to encode", param="prompt")
        self._check_size([text], "prompt")
        ids = [self.tokenizer.controls[text]] if text in self.tokenizer.controls else document(self.tokenizer, text)
        return tuple(ids if whole or len(ids) == 1 else ids[len(self.tokenizer.opening) :])

    def detokenize(self, body: Mapping[str, typing.Any]) -> str:
        """Returns the text of the `tokens` of a body of /detokenize. Raises Refused."""
        fields = Fields(body)
        fields.ignore(("model",))
        ids = fields.take("tokens", list)
        fields.end()
        if ids is None:
            raise Refused("tokens is missing: the ids to decode", param="tokens")
        if len(ids) > self.context:
            raise Refused(f"tokens has {len(ids):,} ids: give at most {self.context:,}", param="tokens")
        return self.tokenizer.decode([i for i in self._sound(ids, "tokens") if i < self.tokenizer.vocab_size])

    def _prompt(self, text: str | list[int], param: str = "prompt") -> Prompt:
        if isinstance(text, str):
            self._check_size([text], param)
            ids, hidden = document(self.tokenizer, text), len(self.tokenizer.opening)
        else:
            ids = opened(self.tokenizer, self._sound(text, param))
            hidden = len(ids) - len(text)
        if not ids:
            raise Refused("prompt is empty, and this model has no start token: give some text", param="prompt")
        return Prompt(tuple(ids), hidden)

    def _conversation(self, messages: list[dict[str, typing.Any]], tools: list | None = None) -> Prompt:
        try:
            chat.template(self.tokenizer)
        except ConfigError:
            raise Refused(
                "this model has no chat template: it continues text and answers no messages. Ask /v1/completions with a "
                "prompt, or fine-tune it on conversations (jaxlm train sft) and serve that run",
                param="messages",
                code="no_chat_template",
            ) from None
        self._check_size([message.get("content") or "" for message in messages], "messages")
        if called := [*(tools or ()), *(m["tool_calls"] for m in messages if "tool_calls" in m)]:
            self._check_size([json.dumps(called, ensure_ascii=False)], "tools")
        try:
            ids = chat.ids(self.tokenizer, messages, tools=tools)
        except ConfigError as error:
            raise Refused(str(error), param="messages") from None
        return Prompt(tuple(ids), len(ids))

    def _check_answers(self, answers: int) -> None:
        if answers > self.most_answers:
            raise Refused(f"{answers} answers in one request: ask for at most {self.most_answers}", param="n")

    def _check_size(self, texts: Sequence[str], param: str) -> None:
        """Raises Refused for texts too long for any tokenization: encoding them would block all other requests."""
        most = self.most_prompt or self.context
        size = sum(len(text.encode()) for text in texts)
        if size > most * min(self._longest, _MOST_BYTES) or len(texts) > most:
            raise _too_long(f"{param} has {size:,} bytes, more than the {most:,} tokens can hold: shorten it")

    @functools.cached_property
    def _longest(self) -> int:
        return max(map(len, (*self.tokenizer.piece_bytes(), *self.tokenizer.controls)))

    def _sound(self, ids: Sequence[typing.Any], param: str) -> list[int]:
        wrong = [i for i in ids if type(i) is not int or not 0 <= i < self.vocab_size]
        if wrong:
            raise Refused(f"{param} has {shown(wrong[0])}, which is no id from 0 to {self.vocab_size - 1}", param=param)
        return [*ids]

    def _request(
        self, fields: Fields, prompts: list[Prompt], n: int, limit: int | None, own: dict, tools: Tools | None = None
    ) -> Request:
        """Returns the request, from keys that both APIs share.

        `limit`: of new tokens; None: COMPLETION_TOKENS for /v1/completions, where `tools` is None, else what fits. `own`: keys
        of the asks that this API alone has.
        """
        default = COMPLETION_TOKENS if tools is None else self.context
        stops = _stops(fields.any("stop"))
        stream = fields.take("stream", bool, False)
        options = Fields(fields.take("stream_options", dict, {}))
        include_usage = options.take("include_usage", bool, False)
        options.ignore(("include_obfuscation",))
        options.end()
        guide, form = self._guide(fields, tools), tools and tools.form
        settings = self._settings(fields) | own
        stop_ids = (*self.ends, *self._sound(fields.take("stop_token_ids", list, []), "stop_token_ids"))
        fields.ignore(("model", *_IGNORED))
        fields.end()
        asks = []
        for prompt in prompts:
            new = min(default if limit is None else limit, self._room(prompt, 1 if limit is None else limit))
            for number in range(n):
                drawn = settings | {"seed": (settings["seed"] + number) % 2**31, "guide": guide()}
                asks.append(Ask(prompt.ids, new, **drawn, stop_ids=stop_ids))
        chat = tools is not None
        return Request(chat, tuple(prompts), tuple(asks), n, stops, stream, include_usage, form)

    def _settings(self, fields: Fields) -> dict[str, typing.Any]:
        seed = fields.take("seed", int)
        return {
            "temperature": fields.number("temperature", float, 1.0, 0, 2),
            "top_p": max(fields.number("top_p", float, 1.0, 0, 1), 1e-6),
            "top_k": fields.number("top_k", int, 0, 0),
            "adapter": self.adapter,
            "seed": secrets.randbits(31) if seed is None else seed % 2**31,
            "bias": self._bias(fields.take("logit_bias", dict, {})),
            "min_p": fields.number("min_p", float, 0.0, 0, 1),
            "penalties": tuple(fields.number(f"{kind}_penalty", float, *rest) for kind, *rest in _PENALTIES),
        }

    def _bias(self, bias: dict[str, typing.Any]) -> dict[int, float]:
        for key, added in bias.items():
            wrong = ""
            if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < self.vocab_size):
                wrong = f"logit_bias has {shown(key)}, which is no id from 0 to {self.vocab_size - 1}"
            elif type(added) not in (int, float) or not -100 <= added <= 100:
                wrong = f"logit_bias of {key} must be a number from -100 to 100, not {shown(added)}"
            if wrong:
                raise Refused(wrong, param="logit_bias")
        return {int(key): float(added) for key, added in bias.items()}

    def _guide(self, fields: Fields, tools: Tools | None) -> Callable[[], typing.Any]:
        """Returns a function that makes a guide for each answer, by schemas; it returns None for plain text."""
        schema = _schema(fields.take("response_format", dict) or {"type": "text"})
        if tools and tools.form:
            for name, of_arguments in tools.schemas.items():
                self.guides.of_schema(of_arguments, f"tools: {name}")  # so that the refusal names the tool
            return self.guides.of_grammar(tools.grammar(self.ends, schema), "tools")
        return self.guides.of_schema(schema) if schema is not None else lambda: None

    def _room(self, prompt: Prompt, least: int) -> int:
        """Returns how many new tokens a prompt leaves room for. Raises Refused if these are less than `least`."""
        length, most = len(prompt.ids), self.most_prompt or self.context
        if length > most:
            raise _too_long(f"the prompt has {length:,} tokens, and at most {most:,} are read: shorten it")
        if length + least > self.context:
            raise _too_long(
                f"the model's context is {self.context:,} tokens; the prompt has {length:,} and {least:,} more are asked for, "
                f"{length + least:,} in all: shorten the prompt or lower max_tokens"
            )
        return self.context - length


def _schema(form: dict[str, typing.Any]) -> dict[str, typing.Any] | None:
    """Returns the JSON schema of a `response_format`; None for plain text."""
    if form.get("type") == "text":
        return None
    schema = {"type": "object"} if form.get("type") == "json_object" else None
    if form.get("type") == "json_schema" and isinstance(form.get("json_schema"), dict):
        schema = form["json_schema"].get("schema")
    if not isinstance(schema, dict):
        raise Refused(
            'response_format must be {"type": "text"}, {"type": "json_object"} or '
            '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}',
            param="response_format",
        )
    return schema


def _too_long(message: str) -> Refused:
    return Refused(message, param="max_tokens", code="context_length_exceeded")


def _prompts(value: typing.Any, param: str = "prompt") -> list[str | list[int]]:
    if isinstance(value, str) or (value and _is_ids(value)):
        return [value]
    if isinstance(value, list) and value and (all(isinstance(p, str) for p in value) or all(map(_is_ids, value))):
        return value
    raise Refused(
        f"{param} must be a string, a list of strings, a list of ids, or a list of lists of ids, not {shown(value)}",
        param=param,
    )


def _is_ids(value: typing.Any) -> bool:
    return isinstance(value, list) and all(type(i) is int for i in value)


def _stops(value: typing.Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise Refused(f"stop must be a string or a list of strings, not {shown(value)}", param="stop")
    if len(stops) > MOST_STOPS:
        raise Refused(f"stop has {len(stops)} strings: give at most {MOST_STOPS}", param="stop")
    if "" in stops:
        raise Refused("stop has an empty string, which matches everywhere: leave it out", param="stop")
    return tuple(stops)


def _messages(value: typing.Any) -> list[dict[str, typing.Any]]:
    if not isinstance(value, list) or not value:
        raise Refused("messages must be a list of messages, at least one", param="messages")
    return [_message(message, f"messages[{number}]") for number, message in enumerate(value)]


def _message(value: typing.Any, where: str) -> dict[str, typing.Any]:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise Refused(f"{where} must be an object with role and content", param=where)
    fields = Fields(value)
    role, content = fields.take("role", str), fields.any("content")
    fields.ignore(("name", "refusal", "annotations"))
    fields.unsupported({"function_call": (), "audio": ()}, "this server writes text alone")
    calls, of_call = fields.take("tool_calls", list) or [], fields.take("tool_call_id", str)
    fields.end()
    if calls and (role != "assistant" or not all(map(is_call, calls))):
        says = 'must be an assistant\'s {"id": ..., "function": {"name": ..., "arguments": "{...}"}}'
        raise Refused(f"{where}.tool_calls {says}", param=where)
    more = ({"tool_calls": calls} if calls else {}) | ({"tool_call_id": of_call} if of_call else {})
    if content is None and calls:
        return {"role": role, "content": Absent(), **more}
    if isinstance(content, list):
        if not all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in content):
            raise Refused(f"{where}.content has a part that is no text: the model reads text alone", param=where)
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise Refused(f"{where}.content must be a string or a list of text parts, not {shown(content)}", param=where)
    return {"role": "system" if role == "developer" else role, "content": content, **more}
