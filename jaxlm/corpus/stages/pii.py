"""Replaces personal data by a placeholder for each kind: `<EMAIL>`, `<PHONE>`, `<IP>`, ...

A cheap regex finds candidates, and only these get the slow checks of libraries. Versions, dates, ISBN, order numbers, private
networks, section numbers stay, and so do numbers and addresses that are nobody's: of manuals, of films, of roles.
"""

import collections
import functools
import ipaddress
import itertools
import re
from collections.abc import Callable, Iterable

import phonenumbers
from stdnum import iban, luhn
from stdnum.us import ssn

from jaxlm.config import ConfigError
from jaxlm.corpus.stage import Document, Edits, Remove, Settings, Stage
from jaxlm.corpus.stages import language
from jaxlm.corpus.stages.credentials import find_secrets

Spans = Iterable[tuple[int, int]]


class Pii(Stage):
    """Replaces personal data by placeholders, and removes no document."""

    @classmethod
    def build(cls, settings: Settings, folder) -> None:
        """Raises ConfigError if a region is unknown."""
        for region in settings.regions:
            if region not in phonenumbers.SUPPORTED_REGIONS:
                raise ConfigError(f"prepare.stages.pii.regions: no region {region!r}; write ('US', 'GB')")

    def apply(self, document: Document, edits: Edits) -> Remove | None:
        """See `Stage.apply`; `edits` counts by placeholder, as in {"EMAIL": 2}."""
        code = _language(document)
        for kind, find in _KINDS.items():
            if kind not in self.settings.kinds:
                continue
            spans = find(document.text, self.settings, code)
            document.text, count = _replace(document.text, spans, f"<{kind.upper()}>")
            if count:
                edits[kind.upper()] += count
        return None


def found(text: str, settings: Settings) -> list[str]:
    spans = [span for kind in settings.kinds for span in _KINDS[kind](text, settings, "")]
    return [text[first:end] for first, end in spans]


def _language(document: Document) -> str:
    """Returns the code of a document's language, "" if unknown. The stage `language` or the source may have told it."""
    if document.metadata.get("format") == "code":
        return "en"
    code = document.metadata.get("language_id") or document.metadata.get("language") or ""
    return re.split("[-_]", str(code).lower())[0]


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
_SPOKEN = re.compile(
    r"(?i)\b\w+(?:(?:\.| dot )\w+)+ at (?:\w+(?: dot |\.))+(?:com|org|net|edu|gov|io|[a-z]{2})\b"
    r"|(?-i:\b[\w.+-]+ AT (?:[\w-]+ DOT )+[A-Za-z]{2,4}\b)"
)
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


def _emails(text: str, settings: Settings, code: str) -> Spans:
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
    cased = domain.islower() or domain.isupper() or domain.istitle()
    return cased and (len(domain) == 2 or domain.lower() in _DOMAINS)


@functools.cache
def _keep(patterns: tuple[str, ...]) -> re.Pattern | None:
    return re.compile("|".join(f"(?:{p})" for p in patterns), re.IGNORECASE) if patterns else None


# Numbers. The text before a number tells what it is; the regexes begin with a digit, so prose costs nearly nothing.
_BEFORE = 28  # characters looked at,
_SENTENCE = 64  # or as much of the sentence
_LABEL_NUMBER = re.compile(  # "order no. 4111111111111111"
    r"(?i)\b(?:isbn|issn|doi|order|invoice|serial|part|model|sku|ref|reference|case|ticket|id|version|patent|asin|upc|ean|"
    r"tracking|imei|oid|build|commit|rev|revision|item|catalog(?:ue)?|barcode|vol(?:ume)?|pp?|pages?|meter|parcel|"
    r"\w*(?:bestell|rechnungs|auftrags|artikel|serien|kunden|teile)nummer|unter der nummer|commande|facture|"
    r"r\xe9f\xe9rence|pedido|factura|referencia|ordine|fattura|articolo|matricola|fatura|encomenda)"
    r"\W{0,3}(?:no\b\.?|nr\b\.?|n[\xb0\xba]|number|code)?(?:\s(?:is|was))?\W{0,3}\Z"
)
_LABEL_VERSION = re.compile(
    r"(?i)(?:\b(?:versi[o\xf3]n[es]?|vers\xe3o|wersja|versie|ver|v|rel|releases?|r|sections?|sec|chapters?|appendix|clause|"
    r"figure|fig|table|rule|rfc|build|kernel|firmware|driver|update|upgraded?|oid|step|article|para(?:graph)?|part|"
    r"abschnitte?|kapitel|ziffer|secci[o\xf3]n|chapitre|cap[i\xed]tulo|sezione|capitolo)\b\.?|§)[\s:=#(]{0,3}(?:(?:to|is|from|and|or|auf|vers|a)\s)?\Z"
)
_LABEL_UPGRADE = re.compile(  # "upgrading the server from 5.15.0.91 to "
    r"(?i)\b(?:(?:up|down)grad|updat|migrat|bump|aktualisier|(?:mise?|mettre) \xe0 jour|actualiz|aggiorn|atualiz)"
    r"[^.!?\n]{0,40}?\s(?:from|to|auf|von|vers|de|\xe0|a|al?la|da)\s(?:v?\d[\d.]*\s(?:to|auf|vers|\xe0|a)\s)?v?\Z"
)
_LABEL_ADDRESS = re.compile(
    r"(?i)(?://|@|\b(?:ip|ipv4|addr(?:ess)?|adresse|direcci[o\xf3]n|indirizzo|endere\xe7o|hosts?|server|serveur|servidor|gateway|dns|nameserver|"
    r"resolver|ping|traceroute|ssh|inet|from|client|peer|router|subnet|src|dst)\b\W{0,3}(?:(?:is|at|to|of|was)\s)?(?:ip\s)?)\Z"
)


def _before(text: str, start: int, chars: int = _BEFORE) -> str:
    return text[max(0, start - chars) : start]


_IPV4 = re.compile(r"\d(?<![\w.+-]\d)\d{0,2}(?:\.\d{1,3}){3}(?![\w-]|\.\w)")
_IPV6 = re.compile(r"[23](?<![\w:.]\d)[0-9a-fA-F]{3}:(?:[0-9a-fA-F]{0,4}:){1,6}[0-9a-fA-F]{0,4}(?![\w:])")


def _ips(text: str, settings: Settings, code: str) -> Spans:
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


_LOG_FOLLOWS = re.compile(r":\d\d|/\d| - \S+ \[")


def _is_version(text: str, match: re.Match) -> bool:
    """Returns True if a dotted quad numbers a version or a section."""
    before = _before(text, match.start())
    if re.search(r"(?i)\bsections?\s\S*/?\Z", before) or _LABEL_UPGRADE.search(_before(text, match.start(), _SENTENCE)):
        return True
    if _LABEL_ADDRESS.search(before) or _LOG_FOLLOWS.match(text, match.end(), match.end() + 60):
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


def _cards(text: str, settings: Settings, code: str) -> Spans:
    for match in _CARD.finditer(text):
        number = re.sub(r"\D", "", match[0])
        issued = any(a <= int(number[: len(str(a))]) <= b and len(number) in n for a, b, n in _ISSUERS)
        before = _before(text, match.start())
        other = re.search(r"[\w./#-]\Z|(?<!\d)\d{4}[ -]\Z", before) or _LABEL_NUMBER.search(before)
        if issued and not other and len(set(number)) > 1 and luhn.is_valid(number):
            yield match.span()


_IBAN = re.compile(  # spaces anywhere
    r"\d(?:(?<=(?<![^\W_])[A-Z]{2}\d)|(?<=(?<![^\W_])[A-Z]{2}[ \xa0]\d))\d(?:[ \xa0\u202f-]?[A-Z0-9]){11,30}(?![A-Za-z0-9])"
)


def _ibans(text: str, settings: Settings, code: str) -> Spans:
    for match in _IBAN.finditer(text):
        start = match.start() - (2 if text[match.start() - 1].isalpha() else 3)
        if text[start - 1 : start] == "_":
            continue
        words = text[start : match.end()]  # the next word may have come along: "... 00 BIC"
        while len(words) > 14:
            if iban.is_valid(re.sub(r"[^A-Z0-9]", "", words), check_country=False):
                yield start, start + len(words)
                break
            words = re.sub(r"[^A-Z0-9]?[A-Z0-9]+\Z", "", words)


_SSN = re.compile(
    r"\d(?<![\w./-]\d)(?<!\d,\d)\d{2}(?:-\d{2}-|[ \xa0]\d{2}[ \xa0]|\d{2}| - \d{2} - )\d{4}(?![\w/-]|\.\d)"
)
_LABEL_SSN = re.compile(
    r"(?i)(?:\bssns?\b|\bss ?(?:#|no\b|num)|\bsoc(?:ial)?(?: security|\.? sec\b|,| is| number|:|\Z))[^\d\n]{0,36}\Z"
)
_SSN_AFTER = re.compile(r"(?i)\s?[(,]?\s?(?:is (?:my|his|her|their) )?(?:ssn\b|social security)")


def _ssns(text: str, settings: Settings, code: str) -> Spans:
    for match in _SSN.finditer(text):
        before = _before(text, match.start(), _SENTENCE)
        labelled = _LABEL_SSN.search(before) or _SSN_AFTER.match(text, match.end())
        valid = ssn.is_valid(re.sub(r"\D", "", match[0])) and not _LABEL_NUMBER.search(before)
        if valid and ("-" in match[0] or labelled):
            yield match.span()


# Hardware addresses: AA:BB:..., AA-BB-..., AABB.CCDD.EEFF. Groups, software's own and samples (00:11:22:...) are nobody's.
_MACS = tuple(
    re.compile(rf"{mark}(?<=(?<![\w:.-]){digits}{mark})(?:{digits}{mark}){{{n}}}{digits}(?![\w:]|[.-]\w)")
    for mark, digits, n in ((":", "[0-9a-fA-F]{2}", 4), ("-", "[0-9a-fA-F]{2}", 4), (r"\.", "[0-9a-fA-F]{4}", 1))
)


def _macs(text: str, settings: Settings, code: str) -> Spans:
    for match in itertools.chain.from_iterable(regex.finditer(text) for regex in _MACS):
        start = match.start() - (4 if match[0][0] == "." else 2)
        address = bytes.fromhex(re.sub(r"[:.-]", "", text[start : match.end()]))
        steps = collections.Counter((b - a) % 256 for a, b in itertools.pairwise(address))
        sample = len(set(address)) < 4 or max(steps.values()) > 2 or address.startswith((b"\0\0\0", b"\0\0\x5e"))
        letters = any(map(str.isalpha, text[start : match.end()]))
        if letters and not address[0] & 3 and not sample:
            yield start, match.end()


# The shapes find candidates; the library checks their numbers, in other countries than North America's their grouping too.
_INTERNATIONAL = re.compile(r"[+0](?<![\w.+=-].)(?:(?<=\+)|0)[1-9](?:[ ()./\u2010-\u2013\xa0-]{0,2}\d){6,14}(?!\w)")
_NANP = re.compile(r"[(2-9](?:(?<=\()[2-9]\d\d\)[ .-]?|(?<=[2-9])\d\d[ .-])\d{3}[ .-]\d{4}(?![\w-]|[.,]\d|/\d)")
_NATIONAL = re.compile(r"\d(?<![\w.,$#+-]\d)(?:(?: /(?= ))?[ ()./\u2010-\u2013\xa0-]{0,2}\d){6,14}(?!\w|[.,-]\d)")
_EXTENSION = re.compile(r",?\s?(?:ext(?:ension)?\b\.?|x)\s?\d{1,6}\b", re.IGNORECASE)
_LABEL_PHONE = re.compile(
    r"(?i)(?:\b(?:tele?(?:ph?on[eo]?|foon|fax)?|t[\xe9e]l(?:[\xe9e](?:phone|fono|fone))?|phone|fax|mobile?|m[o\xf3]vil|cell(?:ul(?:ar|are))?|celular|mob|"
    r"hotline|whatsapp|zap|handy|gsm|\u0442\u0435\u043b(?:\u0435\u0444\u043e\u043d)?|ph(?=[:.]))\b\.?|☎|\u7535\u8bdd|\u96fb\u8a71)"
    r"(?:\s?(?:/\s?fax|no\b\.?|nr\b\.?|n[\xb0\xba]|number|is|at|us at|me at|\([a-z]+\)))*\s?[:.=\uff1a-]?\s*\(?\Z"
)
_LABEL_CALL = re.compile(
    r"(?i)\b(?:call|dial|text|sms|ring|reach(?:ed)?)(?:\s(?:us|me|him|her|them|on|at|or|now|today|toll[ -]free))*:?\s\(?\Z"
)
# Words that ask for a call, some words further on what the number follows: "Text Colin on", "llamar por las tardes al".
_ASKS_CALL = re.compile(
    r"(?i)(?:\b(?:call|calling|dial|text|sms|ring|phone|reach|reached|contact|whatsapp|message|"
    r"\w*r[u\xfc]f\w*|\w*anruf\w*|erreich\w+|meld\w+|kontakt\w*|telefon\w*|handy\w*|mobil\w*|"
    r"appel\w*|t[e\xe9]l[e\xe9]phon\w*|joindre|joignable|contact\w*|compose[rz]?|portable|num[e\xe9]ro|"
    r"(?:mein\w*|my|mi|mijn|meu|moj\w*|mitt?|mio|mon) (?:num\w+|nr)|"
    r"ll[a\xe1]m\w+|tel[e\xe9]fon\w*|m[o\xf3]vil|contact[ae]\w*|marca[rd]?|n[u\xfa]mero|chiam\w+|cellulare|rivolgersi|cell|"
    r"lig(?:ar|ue|uem)|fal(?:ar|e)|celular|cham[ae]\w*|bel(?:len|t)?|bereik\w+|dzwoni\w+|zadzwo\w+|ring\w*|ringa|soita\w*|zavol\w*|volat)\b)"
    r"(?:[^\d.!?\n]|\b[A-Z][a-z]{0,3}\.){0,48}?"
    r"(?:\s(?:on|at|under|or|unter|ist|au|le|est|al|el|es|allo|il|lo|\xe8|\xe9|ao|no|o|pelo|para|op|numer|p\xe5|num[e\xe9]ro|n\xfamero|nummer|number|nr\.?|n[\xb0\xba]\.?)|[:,(])\s*\(?\Z"
)
_DATE = re.compile(r"(?:1[89]|20)\d\d\s?[-/.\u2013]\s?\d\d?(?:\d\d)?\b|\d\d?[-/.]\d\d?[-/.](?:1[89]|20)\d\d")


# Languages, and the countries whose numbers a text in it may hold.
_COUNTRIES = {
    "en": "US GB CA AU IE NZ IN ZA", "de": "DE AT CH", "fr": "FR BE CH", "es": "ES MX AR CO CL PE", "it": "IT CH",
    "pt": "BR PT", "ca": "ES", "gl": "ES", "eu": "ES", "nl": "NL BE", "lb": "LU DE", "da": "DK", "sv": "SE FI", "no": "NO",
    "nb": "NO", "nn": "NO", "fi": "FI", "is": "IS", "pl": "PL", "cs": "CZ", "sk": "SK", "hu": "HU", "ro": "RO", "bg": "BG",
    "el": "GR CY", "tr": "TR", "ru": "RU BY KZ", "uk": "UA", "hr": "HR", "sr": "RS", "bs": "BA", "sl": "SI", "lt": "LT",
    "lv": "LV", "et": "EE", "he": "IL", "ar": "EG SA AE MA", "fa": "IR", "hi": "IN", "ur": "PK", "bn": "BD", "ja": "JP",
    "ko": "KR", "zh": "CN TW HK", "vi": "VN", "th": "TH", "id": "ID", "ms": "MY", "tl": "PH",
}  # fmt: skip
_LANGUAGE_CHARS = 600  # of a text whose language nobody told


def _phones(text: str, settings: Settings, code: str) -> Spans:
    @functools.cache
    def regions() -> tuple[str, ...]:
        codes = [code] if code in _COUNTRIES else language.likely(text, _LANGUAGE_CHARS)
        return tuple(dict.fromkeys([*settings.regions, *(r for c in codes for r in _COUNTRIES.get(c, "").split())]))

    spans = [m.span() for m in _INTERNATIONAL.finditer(text) if _is_international(text, m)]
    if any(phonenumbers.country_code_for_region(region) == 1 for region in settings.regions):
        spans += filter(None, (_north_american(text, match) for match in _NANP.finditer(text)))
    spans += [m.span() for m in _NATIONAL.finditer(text) if _is_national(text, m, settings.regions, regions)]
    for start, end in spans:
        if _is_fictional(text[start:end]):
            continue
        extension = _EXTENSION.match(text, end)
        opened = text[start - 1 : start] == "(" and ")" in text[start:end]
        yield start - opened, extension.end() if extension else end


def _is_fictional(number: str) -> bool:
    """Returns True for 555-0100 to 555-0199, which North America keeps for films and books."""
    return re.search(r"(?:\A|\d{3})55501\d\d\Z", re.sub(r"\D", "", number)) is not None


def _is_international(text: str, match: re.Match) -> bool:
    number = re.sub(r"^00", "+", match[0])
    if number[0] != "+" or (match[0][0] == "0" and number[1:].isdigit()):
        return False
    american = re.fullmatch(r"\+1[ .(-]+[2-9]\d\d[ .)-]+\d{3}[ .-]\d{4}", number)  # also 555-..., which nobody has
    if american or _LABEL_PHONE.search(_before(text, match.start())):
        return True
    return phonenumbers.PhoneNumberMatcher(number, None, leniency=phonenumbers.Leniency.VALID).has_next()


def _north_american(text: str, match: re.Match) -> tuple[int, int] | None:
    """Returns the span of a valid phone number, with a leading "1-" if it has one; else None."""
    before = _before(text, match.start())
    trunk = re.search(r"(?<![\w.,-])1[ .-]\Z", before)
    start = match.start() - (2 if trunk else 0)
    before = _before(text, start)
    if re.search(r"[\w.,$/#+=-]\Z", before) or _LABEL_NUMBER.search(before):
        return None
    row = re.search(r"\d[ ,]*\Z", before) or re.match(r"[ ,]+\d", text[match.end() : match.end() + 4])  # of a table
    if re.match(r"\d+\.\d+-", match[0]) or (row and re.fullmatch(r"\d+ \d+ \d+", match[0])):  # the first is a clause
        return None
    digits = re.sub(r"\D", "", match[0])
    fictional = "555" in (digits[:3], digits[3:6])
    valid = fictional or phonenumbers.is_valid_number(phonenumbers.parse(digits, "US"))
    return (start, match.end()) if valid else None


def _is_national(text: str, match: re.Match, own: tuple[str, ...], regions: Callable[[], tuple[str, ...]]) -> bool:
    """Returns True if a run of digits is a phone number: the text says so, or the digits are grouped as in a region.

    `own` are the regions of the settings, `regions()` also those of the text's language, which may take a while.
    """
    number, before = match[0], _before(text, match.start())
    if _DATE.match(number):
        return False
    if _LABEL_PHONE.search(before):
        return True
    if re.fullmatch(r"\d+\.\d+", number) or number in "01234567890123456789":
        return False
    called = bool(_LABEL_CALL.search(before))
    if called and re.fullmatch(r"[2-9]\d\d-\d{4}", number):
        return True
    asked = called or bool(_ASKS_CALL.search(_before(text, match.start(), _SENTENCE)))
    if not asked and (number.isdigit() or re.search(r"[\d/:][ ,]*\Z", before) or _LABEL_NUMBER.search(before)):
        return False
    if _is_of(number, own, called):
        return True
    if not _is_grouped(number) and not (
        asked and re.fullmatch(r"\d+|\d{5} \d{5}|\d{3} \d{7}|\d{3}\D\d{3}\D\d{3}", number)
    ):
        return False
    return _is_of(number, regions(), called or (asked and number[0] in "0(3") or number.isdigit())


def _is_grouped(number: str) -> bool:
    """Returns True for digits like an unlabelled phone number's: a 0 or area code first, or nine, grouped, and no amount."""
    separators = re.findall(r"\D+", number)
    if number[0] == "0" or ")" in number:
        return bool(separators) and separators != ["."]
    amount = re.fullmatch(r"\d{1,3}(?:\D\d{3})+|\d+(?:\.\d+){3}", number)
    return len(separators) > 1 and sum(map(str.isdigit, number)) >= 9 and not amount


def _is_of(number: str, regions: tuple[str, ...], called: bool) -> bool:
    """Returns True if the number is valid in one of the regions, and grouped as usual there unless `called`.

    North American regions count only if `called`: `_NANP` finds their other numbers.
    """
    leniency = phonenumbers.Leniency.VALID if called else phonenumbers.Leniency.STRICT_GROUPING
    judged = (region for region in regions if called or phonenumbers.country_code_for_region(region) != 1)
    return any(phonenumbers.PhoneNumberMatcher(number, region, leniency=leniency).has_next() for region in judged)


# In this order: a token may hold what looks like an address, a card what looks like a phone.
_KINDS: dict[str, Callable[[str, Settings, str], Spans]] = {
    "secret": lambda text, settings, code: find_secrets(text),
    "email": _emails,
    "iban": _ibans,
    "card": _cards,
    "ssn": _ssns,
    "ip": _ips,
    "mac": _macs,
    "phone": _phones,
}
