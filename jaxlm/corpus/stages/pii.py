"""Replaces personal data by a placeholder for each kind: `<EMAIL>`, `<PHONE>`, `<IP>`, ...

A cheap regex finds candidates, and only these get the slow checks of libraries. Secrets are found by the formats that
their issuers publish, never by entropy. Versions, dates, ISBN, order numbers, private networks, section numbers stay.
"""

import collections.abc
import functools
import ipaddress
import re

import phonenumbers
from detect_secrets.plugins import (
    aws,
    azure_storage_key,
    basic_auth,
    discord,
    github_token,
    gitlab_token,
    mailchimp,
    npm,
    openai,
    pypi_token,
    sendgrid,
    slack,
    square_oauth,
    stripe,
    telegram_token,
    twilio,
)
from stdnum import iban, luhn
from stdnum.us import ssn

from jaxlm.config import ConfigError, nearest
from jaxlm.corpus.stage import Document, Edits, Remove, Settings, Stage

# (Literals or regexes, one of which is in every match; the regexes; the group that is the secret.)
_FORMATS = (
    (("AKIA", "ASIA", "ABIA", "ACCA", "A3T"), aws.AWSKeyDetector.denylist[:1], 0),
    (("aws", "AWS", "Aws"), aws.AWSKeyDetector.denylist[1:], 1),
    (("AccountKey=",), azure_storage_key.AzureStorageKeyDetector.denylist, 0),
    (("://",), basic_auth.BasicAuthDetector.denylist, 1),
    (("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), github_token.GitHubTokenDetector.denylist, 0),
    (("glpat-", "gldt-", "glft-", "glsoat-", "glrt-"), gitlab_token.GitLabTokenDetector.denylist[:1], 0),
    (("GR1348941", "glcbt-", "glimt-", "glptt-", "glagent-", "gloas-"), gitlab_token.GitLabTokenDetector.denylist[1:], 0),
    ((re.compile(r"-us(?<=[0-9a-z]{8}-us)\d"),), mailchimp.MailchimpDetector.denylist, 0),
    (("_authToken",), npm.NpmDetector.denylist, 1),
    (("T3BlbkFJ",), openai.OpenAIDetector.denylist, 0),
    (("pypi-",), pypi_token.PypiTokenDetector.denylist, 0),
    (("SG.",), sendgrid.SendGridDetector.denylist, 0),
    (("xox", "hooks.slack.com"), slack.SlackDetector.denylist, 0),
    (("sq0csp-",), square_oauth.SquareOAuthDetector.denylist, 0),
    (("k_live_",), stripe.StripeDetector.denylist, 0),
    (("AC", "SK"), twilio.TwilioKeyDetector.denylist, 0),
    ((re.compile(r":(?<=\d{8}:)[\w-]{35}"),), telegram_token.TelegramBotTokenDetector.denylist, 0),
    (("M", "N", "O"), discord.DiscordBotTokenDetector.denylist, 0),
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
    (("k_test_",), (re.compile(r"[rs]k_test_[0-9A-Za-z]{24,}"),), 0),
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
_MIN_DISTINCT = 8  # characters; "ghp_xxxxxxxx..." in a manual is no secret
_STANDS_IN = re.compile(r"[<{%$*]|(?i:pass(?:word|wd)?|secret|pw|pwd|x+)$")  # user:password@ in a manual


def find_secrets(text: str) -> collections.abc.Iterator[tuple[int, int]]:
    """Yields (start, end) of each secret; spans of different formats may overlap."""
    for literals, regexes, group in _FORMATS:
        if not any(literal in text if isinstance(literal, str) else literal.search(text) for literal in literals):
            continue
        for regex in regexes:
            for match in regex.finditer(text):
                start, end = match.span(group)
                if _is_secret(text, start, end, password=literals == ("://",)):
                    yield start, end


def _is_secret(text: str, start: int, end: int, password: bool) -> bool:
    """True if a match is no part of a longer word (such as a line of base64) and no placeholder."""
    secret = text[start:end]
    if password:
        return not _STANDS_IN.match(secret)
    around = text[start - 1 : start] + text[end : end + 1]
    if any(c.isascii() and c.isalnum() for c in around) or len(set(secret)) < _MIN_DISTINCT:
        return False
    return any(c.isdigit() for c in secret) or not secret.isupper()


Spans = collections.abc.Iterable[tuple[int, int]]


class Pii(Stage):
    """Replaces personal data by placeholders, and removes no document."""

    @classmethod
    def build(cls, settings: Settings, folder) -> None:
        """Raises ConfigError if a kind or a region is unknown, or a pattern is no regex."""
        for kind in settings.kinds:
            if kind not in _KINDS:
                raise ConfigError(f"prepare.stages.pii.kinds: no kind {kind!r}; {nearest(kind, _KINDS)}")
        for region in settings.regions:
            if region not in phonenumbers.SUPPORTED_REGIONS:
                raise ConfigError(f"prepare.stages.pii.regions: no region {region!r}; write ('US', 'GB')")
        for pattern in settings.keep_emails:
            try:
                re.compile(pattern)
            except re.error as e:
                raise ConfigError(f"prepare.stages.pii.keep_emails: {pattern!r} is no regex: {e}") from e

    def apply(self, document: Document, edits: Edits) -> Remove | None:
        """See `Stage.apply`; `edits` counts by placeholder, as in {"EMAIL": 2}."""
        for kind, find in _KINDS.items():
            if kind not in self.settings.kinds:
                continue
            document.text, count = _replace(document.text, find(document.text, self.settings), f"<{kind.upper()}>")
            if count:
                edits[kind.upper()] += count
        return None


def found(text: str, settings: Settings) -> list[str]:
    spans = [span for kind in settings.kinds for span in _KINDS[kind](text, settings)]
    return [text[first:end] for first, end in spans]


def _replace(text: str, spans: Spans, placeholder: str) -> tuple[str, int]:
    """Replaces the union of the spans. Returns the text, and the number of places that were replaced."""
    pieces, end, count = [], 0, 0
    for a, b in sorted(spans):
        if a >= end:
            pieces += [text[end:a], placeholder]
            count += 1
        end = max(end, b)
    return ("".join([*pieces, text[end:]]), count) if count else (text, 0)


# E-mail. At each "@" the text to its left and right is looked at: a regex for the whole would try every word.
_AT = re.compile(r"[@\[({](?:(?<=@)| ?(?:at|AT|@) ?[\])}])")
_LETTER = r"A-Za-z0-9\u00c0-\u024f"  # not \w: no space parts Chinese or Japanese words from an address
_LOCAL = re.compile(rf"(?<![{_LETTER}._%+-])[{_LETTER}](?:[{_LETTER}._%+'-]{{0,62}}[{_LETTER}_+-])?( ?)\Z")
_DOT = r"(?:\.| ?[\[({] ?(?:dot|DOT|\.) ?[\])}] ?| dot )"
_DOMAIN = re.compile(rf" ?((?:[{_LETTER}](?:[{_LETTER}-]*[{_LETTER}])?{_DOT})+)([A-Za-z]{{2,13}})(?![\w(@])")
_SPOKEN = re.compile(r"(?i)\b\w+(?:(?:[.\d_]| dot )\w*)+ at (?:\w+(?: dot |\.))+(?:com|org|net|edu|gov|io|[a-z]{2})\b")
_LABEL_MESSAGE = re.compile(r"(?i)(?:/m|\bmsg-?id|\bmessage-?id)[/=:\s]{1,3}<?\Z")
# Top-level domains: any two letters, or one of these. Else `icon@2x.png` and `a@b.transpose` would be addresses.
_DOMAINS = frozenset(
    """com org net edu gov mil int info biz name pro aero coop museum jobs mobi travel tel cat asia post arpa app dev
    page blog cloud online site website web store shop shopping tech xyz club live life news media agency email
    company digital design studio world today space group team global network systems software solutions services
    academy center science institute university school college health care clinic law legal consulting finance bank
    capital energy foundation international events community social support education photography photos art music
    video games guru expert tips ninja rocks wiki zone works land city house london berlin paris nyc tokyo
    amsterdam wien swiss gmbh ltd llc inc limited ventures partners marketing press productions church review link
    click top win icu vip fun one plus bio eco green google apple amazon microsoft""".split()  # noqa: SIM905
)


def _emails(text: str, settings: Settings) -> Spans:
    keep = _keep(settings.keep_emails)
    end = 0
    for at in _AT.finditer(text):
        plain = at.end() - at.start() == 1
        domain = _DOMAIN.match(text, at.end())
        local = domain and _LOCAL.search(text, max(end, at.start() - 66), at.start())
        if not local or (plain and (local[1] or domain[0][0] == " ")) or not _is_top(domain[2]):
            continue
        before = _before(text, local.start())
        if re.search(r"//[^\s/]*\Z", before) or _LABEL_MESSAGE.search(before):  # ssh://user@host, .../m/<message id>
            continue
        address = f"{local[0].strip()}@{re.sub(_DOT, '.', domain[1])}{domain[2]}"
        if not (keep and keep.fullmatch(address)):
            end = domain.end()
            yield local.start(), end
    for dot in re.finditer(" (?:dot|DOT) ", text) if " dot " in text or " DOT " in text else ():
        match = _SPOKEN.search(text, max(0, dot.start() - 64), dot.end() + 64)
        if match:
            yield match.span()


def _is_top(domain: str) -> bool:
    return (domain.islower() or domain.isupper() or domain.istitle()) and (
        len(domain) == 2 or domain.lower() in _DOMAINS
    )


@functools.cache
def _keep(patterns: tuple[str, ...]) -> re.Pattern | None:
    return re.compile("|".join(f"(?:{p})" for p in patterns), re.IGNORECASE) if patterns else None


# Numbers. The text before a number tells what it is; the regexes begin with a digit, so prose costs nearly nothing.
_BEFORE = 28  # characters looked at
_LABEL_NUMBER = re.compile(  # "order no. 4111111111111111"
    r"(?i)\b(?:isbn|issn|doi|order|invoice|serial|part|model|sku|ref|reference|case|ticket|id|version|patent|asin|upc|ean|"
    r"tracking|imei|oid|build|commit|rev|revision|item|catalog(?:ue)?|barcode|vol(?:ume)?|pp?|pages?)\W{0,3}(?:no\b\.?|nr\b\.?|number|code)?\W{0,3}\Z"
)
_LABEL_VERSION = re.compile(
    r"(?i)(?:\b(?:versions?|ver|v|rel|releases?|r|sections?|sec|chapters?|appendix|clause|figure|fig|table|rule|rfc|build|kernel|"
    r"firmware|driver|update|upgraded?|oid|step|article|para(?:graph)?|part)\b\.?|§)[\s:=#(]{0,3}(?:(?:to|is|from|and|or)\s)?\Z"
)
_LABEL_ADDRESS = re.compile(
    r"(?i)(?://|@|\b(?:ip|ipv4|addr(?:ess)?|hosts?|server|gateway|dns|nameserver|resolver|ping|traceroute|ssh|inet|from|client|"
    r"peer|router|subnet|src|dst)\b\W{0,3}(?:(?:is|at|to|of|was)\s)?(?:ip\s)?)\Z"
)


def _before(text: str, start: int) -> str:
    return text[max(0, start - _BEFORE) : start]


_IPV4 = re.compile(r"\d(?<![\w.+-]\d)\d{0,2}(?:\.\d{1,3}){3}(?![\w-]|\.\w)")
_IPV6 = re.compile(r"[23](?<![\w:.]\d)[0-9a-fA-F]{3}:(?:[0-9a-fA-F]{0,4}:){1,6}[0-9a-fA-F]{0,4}(?![\w:])")


def _ips(text: str, settings: Settings) -> Spans:
    for match in _IPV4.finditer(text):
        if _is_public(match[0]) and not _is_version(text, match):
            yield match.span()
    for match in _IPV6.finditer(text):  # 2000::/3, which is all that is public; x[2000::2] has too few groups
        if len([group for group in match[0].split(":") if group]) >= 3 and _is_public(match[0]):
            yield match.span()


def _is_public(address: str) -> bool:
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    return ip.is_global and not ip.is_multicast and not address.endswith(".0")  # .0 is a network


def _is_version(text: str, match: re.Match) -> bool:
    """True if a dotted quad numbers a version or a section."""
    before = _before(text, match.start())
    if re.search(r"(?i)\bsections?\s\S*/?\Z", before):  # "section 6.13.16.2/6.13.16.3"
        return True
    if _LABEL_ADDRESS.search(before) or re.match(r":\d\d|/\d| - ", text[match.end() : match.end() + 3]):
        return False
    if _LABEL_VERSION.search(before) or re.search(r"\w/\Z|[=<>~^]=?\s?\Z", before):  # Opera/9.80.1.2, pkg>=1.2.3.4
        return True
    return all(int(part) < 32 for part in match[0].split(".")[:3])  # low numbers are a version, unless it says "host"


_CARD = re.compile(
    r"[2-6]\d{3}(?:([ -]?)\d{4}\1\d{4}\1\d{4}(?:\1\d{1,3})?|([ -]?)\d{6}\2\d{4,5})(?!\w|[.,]\d|[ -]\d{4}(?!\d))"
)
_ISSUERS = (  # first digits from, to, numbers of digits (ISO/IEC 7812; what the issuers publish)
    (4, 4, {16, 19}),  # Visa
    (51, 55, {16}),  # Mastercard
    (2221, 2720, {16}),
    (34, 34, {15}),  # American Express
    (37, 37, {15}),
    (6011, 6011, {16, 19}),  # Discover
    (644, 659, {16, 19}),
    (62, 62, {16, 17, 18, 19}),  # UnionPay
    (300, 305, {14}),  # Diners Club
    (36, 36, {14}),
    (38, 39, {14}),
    (3528, 3589, {16}),  # JCB
)


def _cards(text: str, settings: Settings) -> Spans:
    for match in _CARD.finditer(text):
        number = re.sub(r"\D", "", match[0])
        issued = any(a <= int(number[: len(str(a))]) <= b and len(number) in n for a, b, n in _ISSUERS)
        before = _before(text, match.start())
        other = (
            re.search(r"[\w./#-]\Z|(?<!\d)\d{4}[ -]\Z", before) or _LABEL_NUMBER.search(before) or len(set(number)) == 1
        )
        if issued and not other and luhn.is_valid(number):
            yield match.span()


_IBAN = re.compile(r"[A-Z]{2}\d{2}(?:[ -]?[A-Z0-9]{4}){2,7}(?:[ -]?[A-Z0-9]{1,4})?\b")


def _ibans(text: str, settings: Settings) -> Spans:
    for match in _IBAN.finditer(text):
        if match.start() and (text[match.start() - 1].isalnum() or text[match.start() - 1] == "_"):
            continue
        words = match[0]  # the next word may have come along: "... 00 BIC"
        while len(words) > 14:
            if iban.is_valid(words, check_country=False):
                yield match.start(), match.start() + len(words)
                break
            words = re.sub(r"[ -]?[A-Z0-9]+\Z", "", words)


_SSN = re.compile(r"\d(?<![\w.,/-]\d)\d{2}(?:-\d{2}-| \d{2} |\d{2})\d{4}(?![\w/-]|\.\d)")
_LABEL_SSN = re.compile(r"(?i)(?:\bssn|social security)\b[^\d\n]{0,20}\Z")


def _ssns(text: str, settings: Settings) -> Spans:
    for match in _SSN.finditer(text):
        before = _before(text, match.start())
        digits = re.sub(r"\D", "", match[0])
        if ssn.is_valid(digits) and ("-" in match[0] or _LABEL_SSN.search(before)) and not _LABEL_NUMBER.search(before):
            yield match.span()


# The shapes find candidates; the library checks their numbers, in other countries than North America's their grouping too.
_INTERNATIONAL = re.compile(r"[+0](?<![\w.+=-].)(?:(?<=\+)|0)[1-9](?:[ ()./\u2010-\u2013\xa0-]{0,2}\d){6,14}(?!\w)")
_NANP = re.compile(r"[(2-9](?:(?<=\()[2-9]\d\d\)[ .-]?|(?<=[2-9])\d\d[ .-])\d{3}[ .-]\d{4}(?![\w-]|[.,]\d|/\d)")
_NATIONAL = re.compile(r"\d(?<![\w.,$#+-]\d)(?:[ ()./\u2010-\u2013\xa0-]{0,2}\d){6,14}(?!\w|[.,-]\d)")
_EXTENSION = re.compile(r",?\s?(?:ext(?:ension)?\b\.?|x)\s?\d{1,6}\b", re.IGNORECASE)
_LABEL_PHONE = re.compile(
    r"(?i)(?:\b(?:tele?(?:phone|fon|fax)?|t[ée]l(?:[ée]phone)?|phone|fax|mobile|cell(?:ular)?|mob|hotline|whatsapp|handy|ph(?=[:.]))\b\.?|☎)"
    r"(?:\s?(?:/\s?fax|no\b\.?|nr\b\.?|number|is|at|us at|me at|\([a-z]+\)))*\s?[:.=-]?\s*\(?\Z"
)
_LABEL_CALL = re.compile(
    r"(?i)\b(?:call|dial|text|sms|ring|reach(?:ed)?)(?:\s(?:us|me|him|her|them|on|at|or|now|today|toll[ -]free))*:?\s\(?\Z"
)
_DATE = re.compile(r"(?:1[89]|20)\d\d\s?[-/.\u2013]\s?\d\d?(?:\d\d)?\b|\d\d?[-/.]\d\d?[-/.](?:1[89]|20)\d\d")


def _phones(text: str, settings: Settings) -> Spans:
    spans = [m.span() for m in _INTERNATIONAL.finditer(text) if _is_international(text, m)]
    if any(phonenumbers.country_code_for_region(region) == 1 for region in settings.regions):
        spans += filter(None, (_north_american(text, match) for match in _NANP.finditer(text)))
    spans += [m.span() for m in _NATIONAL.finditer(text) if _is_national(text, m, settings.regions)]
    for start, end in spans:
        extension = _EXTENSION.match(text, end)
        opened = text[start - 1 : start] == "(" and ")" in text[start:end]
        yield start - opened, extension.end() if extension else end


def _is_international(text: str, match: re.Match) -> bool:
    number = re.sub(r"^00", "+", match[0])
    if number[0] != "+" or (match[0][0] == "0" and number[1:].isdigit()):
        return False
    if re.fullmatch(r"\+1[ .(-]+[2-9]\d\d[ .)-]+\d{3}[ .-]\d{4}", number) or _LABEL_PHONE.search(
        _before(text, match.start())
    ):
        return True  # also 555-..., which nobody has
    return phonenumbers.PhoneNumberMatcher(number, None, leniency=phonenumbers.Leniency.VALID).has_next()


def _north_american(text: str, match: re.Match) -> tuple[int, int] | None:
    """Returns the span of a valid phone number, with a leading "1-" if it has one; else None."""
    before = _before(text, match.start())
    one = re.search(r"(?<![\w.,-])1[ .-]\Z", before)
    start = match.start() - (2 if one else 0)
    before = _before(text, start)
    if re.search(r"[\w.,$/#+=-]\Z", before) or _LABEL_NUMBER.search(before):
        return None
    if re.fullmatch(r"\d+ \d+ \d+", match[0]) and (
        re.search(r"\d[ ,]*\Z", before) or re.match(r"[ ,]+\d", text[match.end() : match.end() + 4])
    ):
        return None  # a row of a table
    digits = re.sub(r"\D", "", match[0])
    fictional = "555" in (digits[:3], digits[3:6])
    valid = fictional or phonenumbers.is_valid_number(phonenumbers.parse(digits, "US"))
    return (start, match.end()) if valid else None


def _is_national(text: str, match: re.Match, regions: tuple[str, ...]) -> bool:
    """True if a run of digits is a phone number: the text says so, or the digits are grouped as in one of `regions`."""
    number, before = match[0], _before(text, match.start())
    if _DATE.match(number):
        return False
    if _LABEL_PHONE.search(before):
        return True
    called = _LABEL_CALL.search(before)
    if called and re.fullmatch(r"[2-9]\d\d-\d{4}", number):
        return True
    if not called and (number.isdigit() or re.search(r"[\d/:][ ,]*\Z", before) or _LABEL_NUMBER.search(before)):
        return False
    leniency = phonenumbers.Leniency.VALID if called else phonenumbers.Leniency.STRICT_GROUPING
    return any(
        phonenumbers.PhoneNumberMatcher(number, region, leniency=leniency).has_next()
        for region in regions
        if called or phonenumbers.country_code_for_region(region) != 1
    )


# In this order: a token may hold what looks like an address, a card what looks like a phone.
_KINDS: dict[str, collections.abc.Callable[[str, Settings], Spans]] = {
    "secret": lambda text, settings: find_secrets(text),
    "email": _emails,
    "iban": _ibans,
    "card": _cards,
    "ssn": _ssns,
    "ip": _ips,
    "phone": _phones,
}
