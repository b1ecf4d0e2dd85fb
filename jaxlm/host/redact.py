"""Hides secrets (tokens, passwords, webhooks) in text and values that are written into files or shown."""

import re
import urllib.parse

HIDDEN = "***"  # replaces a secret
_SECRET = re.compile(
    r"(?:^|[_.\-])(?:token|secret|passw(?:or)?d|passphrase|credentials?|signature|authorization|auth|(?:api|access)?key)"
    r"(?:$|[_.\-])",
    re.IGNORECASE,
)
_NO_SECRET = ("text_key",)  # config keys that only look like secrets
_WEBHOOK = re.compile(r"(?:^|[_.\-])(?:webhook|heartbeat_url|urls)$", re.IGNORECASE)
_URL = re.compile(r"\b[a-zA-Z][a-zA-Z0-9+.\-]*://[^\s\"'`<>,;)\]}]+")
_BEARER = re.compile(r"\b(Bearer|Basic)\s+[^\s\"']+", re.IGNORECASE)
_ASSIGNED = re.compile(r"""([A-Za-z][\w.\-]*)(["']?\s*[=:]\s*["']?)([^\s"']+)""")  # NAME=VALUE, name: value
_OPTION = re.compile(r"""(--?[A-Za-z][\w.\-]*)(\s+)([^\s"'\-][^\s"']*)""")  # --name value


def redact(value: object, key: str = "") -> object:
    """Returns a copy of plain values with each secret replaced by `***`.

    Secrets are: values with a name like token, key, secret or password; in URLs, the user, the password and all values of the
    query; in `notify`'s URLs, all but scheme and host, since anybody who knows such a URL can send messages.

    Args:
      value: text, numbers, lists, tuples and dicts; a command line is a list of text.
      key: the dotted name of `value`, such as "notify.urls".
    """
    if isinstance(value, dict):
        return {name: redact(part, f"{key}.{name}" if key else str(name)) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return _redact_words(value, key)
    if not isinstance(value, str) or not value:
        return value
    if _is_secret(key):
        return HIDDEN
    if _WEBHOOK.search(key):
        return _URL.sub(lambda match: redact_url(match[0], webhook=True), value)
    return _redact_text(value)


def redact_url(url: str, webhook: bool = False) -> str:
    """Returns a URL without fragment, and with `***` for user, password and query values; of a webhook only scheme and host.

    Returns text that is no URL, such as a path, unchanged, or `***` if `webhook`.
    """
    if "://" not in url:
        return HIDDEN if webhook else url
    try:
        parts = urllib.parse.urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
    except ValueError:  # brackets that are no IPv6 address
        return f"{url.partition('://')[0]}://{HIDDEN}"
    if webhook:
        place = f"{host}/" if parts.scheme in ("http", "https") else ""
        return f"{parts.scheme}://{place}{HIDDEN}"
    user = f"{HIDDEN}@" if "@" in parts.netloc else ""
    names = [name for name in parts.query.split("&") if name]
    query = "&".join(f"{name.partition('=')[0]}={HIDDEN}" if "=" in name else HIDDEN for name in names)
    return f"{parts.scheme}://{user}{host}{parts.path}" + (f"?{query}" if query else "")


def _is_secret(key: str) -> bool:
    return bool(_SECRET.search(key)) and key.rpartition(".")[2] not in _NO_SECRET


def _redact_words(words: list | tuple, key: str) -> list | tuple:
    """Returns the redacted items of a list. The word after an option without `=`, as in a command line, is its value."""
    redacted, name = [], key
    for word in words:
        if isinstance(word, str) and word.startswith("--"):
            option, equals, value = word.partition("=")
            own = option.removeprefix("--").removeprefix("config.")
            redacted.append(f"{option}={redact(value, own)}" if equals else word)
            name = key if equals else own
        else:
            redacted.append(redact(word, name))
            name = key
    return type(words)(redacted)


def _redact_text(text: str) -> str:
    def named(match: re.Match) -> str:
        return f"{match[1]}{match[2]}{HIDDEN}" if _is_secret(match[1]) else match[0]

    text = _BEARER.sub(rf"\1 {HIDDEN}", _URL.sub(lambda match: redact_url(match[0]), text))
    return _OPTION.sub(named, _ASSIGNED.sub(named, text))
