"""The contestants of an arena: a run's checkpoint, a server with OpenAI's API, a file of samples; and their answers."""

import dataclasses
import http.client
import json
import pathlib
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence

from jaxlm.config import ConfigError, RunError, SampleConfig, config_files
from jaxlm.corpus.benchmarks import reading
from jaxlm.host import files

_PATIENCE_S = 600.0  # for an answer of a server


@dataclasses.dataclass(frozen=True)
class Contestant:
    """A contestant of an arena.

    Attributes:
      kind: "run", "server" or "file".
      where: the folder, the URL (with /v1) or the file.
      which: the checkpoint of a run; the model of a server, "" for its first.
    """

    kind: str
    where: str
    which: str = ""

    @property
    def key(self) -> str:
        where = self.where if self.kind == "server" else str(pathlib.Path(self.where).resolve())
        return f"{self.kind} {where} {self.which}".rstrip()

    @property
    def name(self) -> str:
        """The name that people see after their vote."""
        if self.kind == "server":
            return self.which or urllib.parse.urlsplit(self.where).netloc
        path = pathlib.Path(self.where).resolve()
        if self.kind == "file":
            return f"{path.parent.parent.name} {path.stem}" if path.parent.name == "samples" else path.stem
        return f"{path.name}@{self.which}" if self.which else path.name


def parse(word: str) -> Contestant:
    """Returns the contestant that a word of the command line names: RUN, RUN@STEP, FILE.jsonl or URL[#MODEL]."""
    if re.match(r"https?://", word):
        url, _, which = word.partition("#")
        url = url.rstrip("/")
        return Contestant("server", url if url.endswith("/v1") else f"{url}/v1", which)
    path = files.expanded(word)
    if path.is_file():
        return Contestant("file", str(path))
    folder, step = config_files.at_step(word)
    return Contestant("run", str(files.expanded(folder)), step or "latest")


def names(contestants: Sequence[Contestant]) -> dict[str, str]:
    """Returns key -> name; contestants with equal names are named by their keys. Raises ConfigError if one is given twice."""
    keys = [contestant.key for contestant in contestants]
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise ConfigError(f"{twice} takes part twice: name two that differ, such as RUN@100 and RUN@200")
    short = [contestant.name for contestant in contestants]
    return {key: name if short.count(name) == 1 else key for key, name in zip(keys, short, strict=True)}


def read_samples(path: str) -> dict[str, str]:
    """Returns prompt -> text of a file of lines {"prompt": ..., "text": ...}; of several texts on a prompt the first."""
    texts: dict[str, str] = {}
    for number, record in reading.records(path):
        prompt, text = record.get("prompt"), record.get("text")
        if not isinstance(prompt, str) or not isinstance(text, str):
            raise ConfigError(f'{path}:{number} is no sample: it must be {{"prompt": "...", "text": "..."}}')
        texts.setdefault(prompt, text)
    if not texts:
        raise ConfigError(f"{path} holds no samples")
    return texts


def read_prompts(path: str) -> list[str]:
    """Returns the prompts, each once, of {"prompt": ...} records or of lines. Raises ConfigError if there are none."""
    if path.endswith((".jsonl", ".json", ".jsonl.gz")):
        prompts = [record.get("prompt") for _, record in reading.records(path)]
        if bad := next((n for n, prompt in enumerate(prompts, 1) if not isinstance(prompt, str)), None):
            raise ConfigError(f'--prompts={path}: record {bad} has no "prompt"')
    else:
        try:
            text = pathlib.Path(path).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--prompts={path} can't be read: {error}") from None
        prompts = [line for line in text.split("\n") if line.strip()]
    if not prompts:
        raise ConfigError(f"--prompts={path} holds no prompts")
    return [*dict.fromkeys(prompts)]


def ask(server: Contestant, prompt: str, settings: SampleConfig, seed: int) -> str:
    """Returns a server's answer, from its chat API if `settings.chat_template`, else from its completions API."""
    model = server.which or _model(server.where)
    body = {"model": model, "max_tokens": settings.max_new_tokens, "temperature": settings.temperature}
    body |= {"top_p": settings.top_p, "seed": seed}
    body |= {"top_k": settings.top_k} if settings.top_k else {}  # not OpenAI's, but local servers know it
    if settings.chat_template:
        answer = _call(f"{server.where}/chat/completions", body | {"messages": [{"role": "user", "content": prompt}]})
    else:
        answer = _call(f"{server.where}/completions", body | {"prompt": prompt})
    try:
        choice = answer["choices"][0]
        return (choice["message"]["content"] if settings.chat_template else choice["text"]) or ""
    except (KeyError, IndexError, TypeError):
        raise RunError(f"{server.where} answers in an unknown form: {json.dumps(answer)[:200]}") from None


def _model(url: str) -> str:
    models = _call(f"{url}/models", None)
    try:
        return models["data"][0]["id"]
    except (KeyError, IndexError, TypeError):
        raise RunError(f"{url}/models names no model: give one, {url}#MODEL") from None


def _call(url: str, body: dict | None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_PATIENCE_S) as answer:
            return files.json_of(answer.read())
    except urllib.error.HTTPError as error:
        raise RunError(f"{url} answers {error.code}: {error.read(300).decode(errors='replace')}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise RunError(f"{url} can't be asked: {error}") from None
