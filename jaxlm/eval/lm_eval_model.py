"""A model as EleutherAI's lm-evaluation-harness takes it. Imports lm_eval: import this module where it is needed."""

from collections.abc import Iterable

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM

from jaxlm.config import ConfigError, SampleConfig
from jaxlm.data import chat
from jaxlm.data.ids import conversation, document
from jaxlm.eval import completions
from jaxlm.eval.branches import Request
from jaxlm.eval.likelihood import Scorer

_NEW_TOKENS = 256  # of a text whose task names no limit, as lm-evaluation-harness has it


class ScorerLM(TemplateLM):
    """Answers the harness's requests with a `Scorer`.

    A text gets the ids that lm_eval's `hf` model gives it with the exported tokenizer: what documents begin with, once, then
    the text. Unlike there a rolling likelihood has it once too: `hf` puts it in front of a text that already begins with it.

    Args:
      chats: True if contexts are conversations, as `apply_chat_template` writes them. Raises ConfigError if the model has no
        template.
    """

    def __init__(self, scorer: Scorer, what: str, chats: bool = False):
        super().__init__()
        self.scorer, self._what, self._chats = scorer, what, chats
        if chats:
            chat.template(scorer.tokenizer)

    @property
    def tokenizer_name(self) -> str:
        """Returns what tells the tokenizer from others."""
        return self.scorer.tokenizer.sha256

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Returns a conversation in the model's own template; without its system message if the template refuses it."""
        tokenizer = self.scorer.tokenizer
        try:
            return chat.render(tokenizer, chat_history, add_generation_prompt)
        except ConfigError:
            rest = [message for message in chat_history if message["role"] != "system"]
            if len(rest) == len(chat_history):
                raise
        found = chat.render(tokenizer, rest, add_generation_prompt)
        self.scorer.say_once(f"{self._what}: without system messages, which the model's chat template refuses")
        return found

    @property
    def eot_token_id(self) -> int:
        """Returns EOS."""
        return self.scorer.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """Returns the id that stands before a text without context."""
        return self.scorer.opening

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        """Returns the ids of a text, as a document's beginning unless `add_special_tokens` is False."""
        del kwargs
        tokenizer = self.scorer.tokenizer
        if add_special_tokens is False:
            return tokenizer.encode(string)
        return conversation(tokenizer, string) if self._chats else document(tokenizer, string)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if self._chats:
            continuation = chat.guarded(self.scorer.tokenizer, continuation)
        return super()._encode_pair(context, continuation)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Returns (log p in nats, whether it is what greedy decoding writes) of each continuation after its context."""
        del disable_tqdm
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs
    ) -> list[tuple[float, bool]]:
        del kwargs
        return [(s.logp, s.greedy) for s in self.scorer.score([(c, ids) for _, c, ids in requests], self._what)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Returns log p of each whole text, in windows if it is longer than the model's context."""
        del disable_tqdm
        return [score.logp for score in self.scorer.score([self._whole(*r.args) for r in requests], self._what)]

    def _whole(self, text: str) -> Request:
        return (self.prefix_token_id,), self.scorer.tokenizer.encode(text)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Returns what the model writes after each context, up to the task's stop strings."""
        del disable_tqdm
        by_settings: dict[tuple[tuple[str, ...], SampleConfig], list[int]] = {}
        for number, request in enumerate(requests):
            by_settings.setdefault(_settings(request.args[1]), []).append(number)
        texts: dict[int, str] = {}
        for (stops, settings), numbers in by_settings.items():
            prompts = [self.tok_encode(requests[number].args[0]) for number in numbers]
            found = completions.complete(self.scorer, prompts, stops, settings, 0, self._what)
            texts |= zip(numbers, found, strict=True)
        return [texts[number] for number in range(len(requests))]


def _settings(asked: dict) -> tuple[tuple[str, ...], SampleConfig]:
    """Returns (stop strings, settings) of a task's `generation_kwargs`."""
    until: str | Iterable[str] = asked.get("until") or ()
    sampled = asked.get("do_sample", asked.get("temperature", 0) > 0) and asked.get("temperature", 1) > 0
    limit = next((asked[key] for key in ("max_gen_toks", "max_new_tokens", "max_tokens") if key in asked), _NEW_TOKENS)
    settings = completions.greedy(int(limit))
    if sampled:
        changed = {key: asked[key] for key in ("temperature", "top_k", "top_p") if key in asked}
        settings = SampleConfig(**{**vars(settings), "temperature": 1.0, **changed})
    return (until,) if isinstance(until, str) else tuple(until), settings
