"""Finds secrets in a text: keys and tokens by the formats that their issuers publish, and passwords that are assigned.

A word such as "password" or API_KEY must stand before a value that has no format; entropy alone proves nothing. Placeholders,
variables, calls, sample keys and words of examples are no secrets.
"""

import collections.abc
import re

from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class

_PLUGINS = get_mapping_from_secret_type_to_class()
# (Literals or regexes, one of which is in every match; the regexes; the group that is the secret.)
_FORMATS = (
    (("AKIA", "ASIA", "ABIA", "ACCA", "A3T"), _PLUGINS["AWS Access Key"].denylist[:1], 0),
    (("aws", "AWS", "Aws"), _PLUGINS["AWS Access Key"].denylist[1:], 1),
    (("AccountKey=",), _PLUGINS["Azure Storage Account access key"].denylist, 0),
    (("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), _PLUGINS["GitHub Token"].denylist, 0),
    (("glpat-", "gldt-", "glft-", "glsoat-", "glrt-"), _PLUGINS["GitLab Token"].denylist[:1], 0),
    (("GR1348941", "glcbt-", "glimt-", "glptt-", "glagent-", "gloas-"), _PLUGINS["GitLab Token"].denylist[1:], 0),
    ((re.compile(r"-us(?<=[0-9a-z]{8}-us)\d"),), _PLUGINS["Mailchimp Access Key"].denylist, 0),
    (("_authToken",), _PLUGINS["NPM tokens"].denylist, 1),
    (("T3BlbkFJ",), _PLUGINS["OpenAI Token"].denylist, 0),
    (("pypi-",), _PLUGINS["PyPI Token"].denylist, 0),
    (("SG.",), _PLUGINS["SendGrid API Key"].denylist, 0),
    (("xox", "hooks.slack.com"), _PLUGINS["Slack Token"].denylist, 0),
    (("sq0csp-",), _PLUGINS["Square OAuth Secret"].denylist, 0),
    (("k_live_",), _PLUGINS["Stripe Access Key"].denylist, 0),
    (("AC", "SK"), _PLUGINS["Twilio API Key"].denylist, 0),
    ((re.compile(r":(?<=\d{8}:)[\w-]{35}"),), _PLUGINS["Telegram Bot Token"].denylist, 0),
    ((re.compile(r"\.(?<=[\w-]{23}\.)[\w-]{6}\.[\w-]{27}"),), _PLUGINS["Discord Bot Token"].denylist, 0),
    # JWT with its signature. Only where a run of such characters begins, and only if the payload follows: linear time.
    (("eyJ",), (re.compile(r"(?a)(?<![\w-])(?=[\w-]++\.eyJ[\w-]{4})(?:[\w-]*?[_-])??"
        r"(eyJ[\w-]{8,}+\.eyJ[\w-]{4,}+(?:\.[\w-]*+)?)"),), 1),
    # As their issuers publish them, and not in detect-secrets 1.5.
    (("AIza",), (re.compile(r"AIza[\w-]{35}"),), 0),
    (("GOCSPX-",), (re.compile(r"GOCSPX-[\w-]{28}"),), 0),
    (("ya29.",), (re.compile(r"ya29\.[\w-]{30,}"),), 0),
    (("github_pat_",), (re.compile(r"github_pat_\w{50,}"),), 0),
    (("npm_",), (re.compile(r"npm_[A-Za-z0-9]{36}"),), 0),
    (("hf_",), (re.compile(r"hf_[A-Za-z]{34}"),), 0),
    (("sk-",), (re.compile(r"sk-(?:[a-z]+\d*-)*[A-Za-z0-9][\w-]{31,}"),), 0),  # OpenAI, Anthropic, OpenRouter
    (("whsec_",), (re.compile(r"whsec_[A-Za-z0-9+/=]{24,}"),), 0),
    (("xapp-",), (re.compile(r"xapp-\d-\w+-\d+-[a-f0-9]{32,}"),), 0),
    (("api/webhooks/",), (re.compile(r"discord(?:app)?\.com/api/webhooks/\d+/[\w-]{60,}"),), 0),
    (("dop_v1_",), (re.compile(r"dop_v1_[a-f0-9]{64}"),), 0),
    (("shpat_", "shpca_", "shppa_", "shpss_"), (re.compile(r"shp(?:at|ca|pa|ss)_[a-fA-F0-9]{32}"),), 0),
    (("AGE-SECRET-KEY-",), (re.compile(r"AGE-SECRET-KEY-1[A-Z0-9]{58}"),), 0),
    (("ecret", "ECRET"), (re.compile(r"(?i)secret_?(?:access_?)?key[\"']?\s{0,3}[=:]\s{0,3}[\"']?([0-9a-z/+]{40})\b"),), 1),
    # The whole block is the secret; a title alone, or one with "..." for a body, is none.
    (("PRIVATE KEY",), (re.compile(r"-----BEGIN ([A-Z0-9 ]*)PRIVATE KEY(?: BLOCK)?-----(?=[\s\S]{0,400}?[A-Za-z0-9+/=]{40})"
        r"(?:[^-]|-(?!----))+(?:-----END \1PRIVATE KEY(?: BLOCK)?-----)?"),), 0),
    (("PuTTY-User-Key-File-",), (re.compile(r"PuTTY-User-Key-File-\d:[\s\S]{0,4000}?Private-MAC: ?[0-9a-f]+"),), 0),
)  # fmt: skip
_HINTS = tuple((hint, i) for i, (hints, *_) in enumerate(_FORMATS) for hint in hints)
_LITERALS = tuple((hint, i) for hint, i in _HINTS if isinstance(hint, str))
_SHAPES = tuple((hint, i) for hint, i in _HINTS if not isinstance(hint, str))
_MIN_DISTINCT = 8  # characters; "ghp_xxxxxxxx..." in a manual is no secret


def find_secrets(text: str) -> collections.abc.Iterator[tuple[int, int]]:
    """Yields (start, end) of each secret; spans of different formats may overlap."""
    formats = {i for literal, i in _LITERALS if literal in text} | {i for shape, i in _SHAPES if shape.search(text)}
    for i in sorted(formats):
        _, regexes, group = _FORMATS[i]
        for regex in regexes:
            for match in regex.finditer(text):
                if _is_secret(text, *match.span(group)):
                    yield match.span(group)
    yield from _passwords(text)
    yield from _keys(text)


def _is_secret(text: str, start: int, end: int) -> bool:
    """Returns True if a match is no part of a longer word (such as a line of base64), no placeholder and no sample."""
    secret = text[start:end]
    around = text[start - 1 : start] + text[end : end + 1]
    if any(c.isascii() and c.isalnum() for c in around) or len(set(secret)) < _MIN_DISTINCT or "EXAMPLE" in secret:
        return False
    return any(c.isdigit() for c in secret) or not secret.isupper()


# Passwords. "password" in several languages, perhaps within a name such as DB_PASSWORD; then what assigns; then the value.
_STEMS = (
    "assw", "asscode", "assphrase", "ennwort", "ontrase", "clave",
    "ASSW", "pass:", "pass=", "pass =", "_pass", "PASS=", "_PASS", "pass\"", "pwd", "PWD",
    "mot de passe", "mdp", "senha", "wachtwoord", "adgangskode", "salasana", "heslo", "parola",
    "as\u0142o", "\xf6senord", "jelsz\xf3", "\u0430\u0440\u043e\u043b\u044c", "\u5bc6\u7801", "\u30d1\u30b9\u30ef",
)  # fmt: skip
_AROUND = (14, 200)  # characters before and after a stem that are looked at
_NAME = (
    r"(?:passwor[dt]|passwd|passcode|passphrase|(?<![a-z])pass(?![a-z])|kennwort|mot de passe|(?<![a-z])mdp|"
    r"contrase\xf1a|contrasena|(?<!\w)clave|(?<!\w)senha|palavra-passe|wachtwoord|has[\u0142\u0141]o|l\xf6senord|adgangskode|"
    r"salasana|(?<!\w)heslo|jelsz\xf3|(?<!\w)parola|\u043f\u0430\u0440\u043e\u043b\u044c|\u5bc6\u7801|\u30d1\u30b9\u30ef\u30fc\u30c9|(?<![a-z])pwd|psswd)"
)
_IS = r"(?:is|was|lautet|ist|est|es|\xe8|\xe9|jest|er)(?:[ \t](?:now|still|jetzt|ahora|set[ ]to|changed[ ]to)\b)?"
_ASSIGNED = re.compile(
    rf"(?i){_NAME}\w*"
    r"(?:[ \t](?:for|to|of|on|f\xfcr|zum|zur|vom|de|du|del|para|per|di|do|da|van|voor)[ \t][^\n:=.\"']{1,40}?)?"
    r"(?:[\"'`\])*]{1,3}[ \t]{0,3}(?P<comma>,)|[\"'`\])*]{0,3}[ \t]{0,3}(?:=>|:=|={1,3}|:=?|>|"
    rf"(?P<verb>(?<=[ \t]){_IS}(?=[ \t:]))))[ \t]{{0,3}}:?[ \t]{{0,3}}"
    r"(?P<quote>\\?[\"'`\u201c\u201e]?)(?P<value>[^\s\"'`\u201c\u201d<]{4,100})(?P<after>[\"'`\u201c\u201d(<]?)"
)
_OPTION = re.compile(  # curl -u "user:...", sshpass -p ..., mysql -p..., .netrc, SQL
    r"(?:(?<![\w-])(?:-u|--user|--proxy-user)[ =]?[\"']?[^\s:\"'$<{]+:|\bsshpass[ ]-p[ ]?[\"']?|"
    r"--passw(?:or)?d[ ][\"']?|\bmysql\w*[ ](?:[^\n]{0,60}?[ ])?-p[\"']?|"
    r"\blogin[ ]\S+[ ]+password[ ]|(?i:\bidentified[ ]by[ ])[\"'])(?P<value>[^\s\"'`]{4,100})"
)
_AT = re.compile(r"(?<![\w/.])[\w.-]{2,40}:([^\s:@/\"'<>]{6,40})\Z")  # user:password@host
_URL = re.compile(r"://([^\s/:@?#\"'<>]*):([^\s/?#\"'<>]{1,100})@(?=[\w\[.-])")
_PLACEHOLDER = re.compile(r"[<{%*\[(!@]|\$(?!\d\w?\$)|.*(?:\$\{|\{\{|\$\()")
_CODE = re.compile(  # what a variable may be set to; a path, an address, a file's name
    r"[A-Za-z_$][\w$]*(?:\.|->|::|\[|\()[A-Za-z_\"'\[(]|\w+\(|.*/.*\.\w+$|\.{0,2}/|\w+://|[\w-]+\.[a-z]{1,4}$"
)
_EXAMPLE = re.compile(
    r"(?i)your|change|replace|example|placeholder|dummy|sample|redacted|fake|insert|x{3}|\*{3}|\.{3}|\u2026|12345|abcdef|1a2b3c|anon|"
    r"(?:^|[_-])(?:test|demo|sandbox)(?:[_-]|$)"
)
_EXAMPLE_WORDS = re.compile(
    r"(?:pass(?:w(?:or)?[dt])?|pw|pwd|word|phrase|secret|geheim|test|testing|demo|admin|administrator|root|user|username|guest|foo|bar|baz|qux|"
    r"hunter|letmein|welcome|qwerty|abc|default|none|null|nil|true|false|undefined|token|api|key|value|string|text|hello|world|my|mon|mi|"
    r"new|old|the|a|an|db|database|some|any|super|top|very|strong|secure|long|good|bad|wrong|right|correct|temp|login|motdepasse|"
    r"contrasena|clave|senha|postgres|mysql|redis|mongo|hash|enter|here|is|in|and|or|only|protected|required|x|y|z)*"
)
_EXAMPLE_LETTERS = 32  # `_EXAMPLE_WORDS` tries all ways to part a string into words
_LEET = str.maketrans("013457@$!", "oieastasi")
_ALGORITHM = re.compile(
    r"(?i)(?:s?sha|md|base|utf|aes|des|rsa|bcrypt|scrypt|argon|pbkdf|oauth|crypt|ntlm|iso|rfc|fips|tls|v)[-_]?\d"
)


def _passwords(text: str) -> collections.abc.Iterator[tuple[int, int]]:
    for match in _assignments(text):
        end = match.start("value") + len(_value(match))
        if _is_password(text[match.start("value") : end], match):
            yield match.start("value"), end
    options = (" -u", "--user", "--passw", "--proxy-user", "sshpass", "mysql") if " -" in text else ()
    if any(word in text for word in (*options, "login ", "dentified by", "DENTIFIED BY")):
        for match in _OPTION.finditer(text):
            if not _stands_in(match["value"]) and _classes(match["value"]) >= 2:
                yield match.span("value")
    if "://" in text:
        for match in _URL.finditer(text):
            if match[2] != match[1] and not _stands_in(match[2]):
                yield match.span(2)
    for at in _places(text, "@"):
        match = _AT.search(text, max(0, at - 82), at)
        if match and re.search(r"[!#$%^&*]", match[1]) and _classes(match[1]) >= 3 and not _stands_in(match[1]):
            yield match.span(1)


def _places(text: str, words: str) -> collections.abc.Iterator[int]:
    """Yields where words begin in a text: several times as fast as a regular expression."""
    at = text.find(words)
    while at >= 0:
        yield at
        at = text.find(words, at + 1)


def _assignments(text: str) -> collections.abc.Iterator[re.Match]:
    """Yields the matches of `_ASSIGNED`, which is too slow for a whole text."""
    assigns = any(mark in text for mark in (":", "=", ">", '", "', "', '"))
    stems = _STEMS if assigns or not text.isascii() or " est " in text else _STEMS[:6]  # or a verb does
    for stem in stems:
        value = 0  # where the value of the last match begins
        for at in _places(text, stem):
            if at >= value and (match := _ASSIGNED.search(text, max(0, at - _AROUND[0]), at + _AROUND[1])):
                value = match.start("value")
                yield match


def _value(match: re.Match) -> str:
    """Returns the value that `_ASSIGNED` found: within its quotation marks, or up to where a sentence goes on."""
    value = match["value"]
    if match["quote"] and match["after"]:
        return value.rstrip("\\")
    if not match["verb"]:
        value = re.split(r"[,;&](?=\S)", value)[0]
    return value.rstrip(".,;:)]}|*")


def _is_password(value: str, match: re.Match) -> bool:
    quoted = bool(match["quote"] and match["after"])
    if (match["comma"] and not quoted) or match["after"] == "(" or len(value) < 6 or _stands_in(value):
        return False
    if not quoted and _CODE.match(value):
        return False
    classes, digits = _classes(value), any(map(str.isdigit, value))
    if value.isidentifier() and not quoted and re.search(r"(?i)pass|pwd|secret|token|key", value):
        return False  # a variable
    if classes >= 3:
        return digits or not value[1:].replace("-", "").isalpha()
    letters = any(map(str.isalpha, value))
    if quoted:
        return letters and classes >= 2 and (digits or bool(re.search(r"[!#$%^&*@+=?]", value)))
    return bool(letters and digits and len(value) >= 8 and not re.match(r"\d+-?[A-Za-z]+", value))


def _classes(value: str) -> int:
    """Returns how many kinds of characters a value has: small letters, capitals, digits, other marks."""
    kinds = (str.islower, str.isupper, str.isdigit, lambda c: not c.isalnum())
    return sum(any(kind(c) for c in value) for kind in kinds)


def _stands_in(value: str) -> bool:
    """Returns True for a placeholder or example ("<password>", $VAR, your-key, "Passw0rd") or the name of an algorithm."""
    letters = re.sub(r"[\W\d_]", "", value.lower())
    leet = re.sub(r"[\W\d_]", "", re.sub(r"\W+\Z", "", value.lower()).translate(_LEET))
    return bool(
        _PLACEHOLDER.match(value)
        or _EXAMPLE.search(value)
        or (len(letters) <= _EXAMPLE_LETTERS and (_EXAMPLE_WORDS.fullmatch(letters) or _EXAMPLE_WORDS.fullmatch(leet)))
        or _ALGORITHM.match(value)
    )


# Keys and tokens of unknown issuers: their name, then 16 or more characters as a generator makes them.
_KEY_NAME = re.compile(
    r"(?:(?i:api|access|secret|auth|private|client|account|service|encrypt\w*|signing|master|app|deploy|licen[cs]e|subscription)"
    r"[ _.-]?|(?<=[A-Z])_)\Z"
)
_KEY = re.compile(
    r"(?:(?P<key>key)|token|secret|bearer[ ])(?:_?id)?[\"'`\])]{0,2}[ \t]{0,3}"
    r"(?:(?<=(?<=earer)[ ])|=>|:=|={1,3}|:|,(?=[ ]?[\"'])|(?<=[ \t])is[ \t])[ \t]{0,3}(?:bearer[ ])?"
    r"(?P<quote>[\"'`]?)(?P<value>[\w+/=.~-]{16,200})",
    re.IGNORECASE,
)
_KEY_STEMS = dict.fromkeys(("key", "KEY", "Key"), 0) | dict.fromkeys(("oken", "OKEN", "ecret", "ECRET", "earer"), 1)


def _keys(text: str) -> collections.abc.Iterator[tuple[int, int]]:
    for stem, before in _KEY_STEMS.items():  # before: characters of the name before the stem
        for at in _places(text, stem):
            match = _KEY.match(text, at - before) if at >= before else None
            if not match or (match["key"] and not _KEY_NAME.search(text, max(0, match.start() - 16), match.start())):
                continue
            value = match["value"].rstrip(".=-")
            if (not match["quote"] and _CODE.match(value)) or value.startswith("eyJ"):  # a JWT has a format of its own
                continue
            if _is_generated(value) and not _EXAMPLE.search(value):
                yield match.start("value"), match.start("value") + len(value)


def _is_generated(value: str) -> bool:
    """Returns True if a value looks like random letters and digits, not like words."""
    if len(set(value)) < _MIN_DISTINCT or sum(map(str.isdigit, value)) < 2 or re.search(r"[a-z]{9}", value):
        return False
    parts = re.split(r"[^A-Za-z0-9]", value)
    longest = max(parts, key=len)
    return len(value) >= 16 and (
        (len(longest) >= 12 and not longest.isdigit() and not longest.isalpha())
        or (len(value) >= 24 and _classes(value) >= 3 and not any(part.isalpha() and len(part) > 5 for part in parts))
        or bool(re.fullmatch(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", value))
    )
