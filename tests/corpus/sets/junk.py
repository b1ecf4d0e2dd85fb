"""Planted junk: made-up texts of twelve kinds of junk that crawled text is full of."""

from __future__ import annotations

import base64
import json
import random
import re
from collections.abc import Callable

# fmt: off
NOUNS = (
    "river bridge teacher harbour garden market letter winter village council farmer railway window doctor museum valley school "
    "captain lantern merchant forest kitchen newspaper chapel factory sailor library meadow station castle tower cellar"
).split()
ADJECTIVES = "quiet narrow famous wooden bright distant broken modern gentle heavy crowded local grey lonely remote".split()
VERBS = "crossed repaired described followed admired abandoned painted visited defended measured remembered sold rebuilt".split()
PLACES = "Leeds Bristol Derby Norwich Exeter Durham Lincoln Oxford Chester Preston Carlisle Ipswich Warwick Bedford".split()
NAMES = "John Mary Alex Laura Peter Ahmed Sofia Daniel Grace Victor Nina Oscar Helen Marco Julia Simon Tara Felix".split()
BRANDS = "Velora Nordax Zenfit Kairo Lumexa Brixon Talvo Optiqa Ferrano Yuvia Domexa Stridewell Pantero Quillo".split()
PRODUCTS = (
    "running shoes,leather handbag,wrist watch,yoga mat,gaming laptop,phone case,hair dryer,winter jacket,sunglasses,"
    "garden chair,diet pills,car insurance,wireless earbuds,baby stroller,mattress,essay writing service,kitchen knife"
).split(",")
BUY = "buy cheap discount best affordable wholesale original genuine free-shipping top-rated replica outlet clearance".split()
TAIL = "online,sale,for sale,near me,free shipping,price,review,coupon code,2023,2024,outlet,uk,usa,store,order now".split(",")
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split()
PROSE = (
    "The {a} {n} near {p} was {v} by the {n2} in {y}.",
    "In {y} {name} {v} the {a} {n}, and the {n2} of {p} wrote about it for many years.",
    "Nobody in {p} knew why the {n} had become so {a}, but the {n2} stayed open every {day}.",
    "{name} {v} the {n} on a {day}, long before the {a} {n2} was finished.",
    "It takes about {k} minutes to walk from the {n} to the {a} {n2}.",
    "The {n2} kept {k} books, a {a} clock and the plans of the {n}.",
    "According to {name}, the {a} {n} in {p} holds more than {k} visitors.",
    "When the {n} closed in {y}, the {n2} moved to a {a} building behind the station at {p}.",
    "There was a {a} {n} at the end of the street, and {name} {v} it more than once.",
)
FOREIGN = (
    (
        "Die Bürger von {p} müssen für das Gebäude über {k} Euro zurückzahlen.",
        "Während der Führung erzählte {name} von den schönen Häusern und den alten Mühlen im Süden.",
        "Außerdem wäre es möglich, die Öffnungszeiten im Frühjahr auf {k} Stunden zu verkürzen.",
        "Natürlich hätte {name} die Schlüssel für die Küche früher zurückgeben können \u2013 so heißt es.",
        "Im Jahr {y} fuhr die Straßenbahn täglich über die große Brücke bis zum Café am Königsplatz.",
        "\u201eDas ist ungewöhnlich\u201c, erklärte {name}, während die Gäste noch frühstückten.",
    ),
    (
        "Le théâtre de {p} a été rénové en {y} grâce à la générosité des élèves et de leurs familles.",
        "L\u2019été dernier, {name} a préféré rester à la maison, où la fenêtre était déjà cassée.",
        "Il paraît que le maire a reçu {k} lettres à propos de l\u2019église et du marché fermé.",
        "Après le dîner, {name} espérait voir la forêt, mais le château n\u2019était pas éclairé.",
        "Cette société française, créée en {y}, a très vite développé des modèles légers et économiques.",
        "Ça coûte {k} € par mois, ce qui paraît élevé pour un forfait limité.",
    ),
    (
        "El año {y} la señora {name} compró una pequeña casa con jardín cerca de la estación de {p}.",
        "Según el periódico, más de {k} niños participarán mañana en la celebración del otoño.",
        "¿Cuándo volverá {name} al colegio? Todavía no está claro, respondió el médico.",
        "La situación económica será difícil, pero también habrá {k} proyectos de educación pública.",
        "Después del café, el músico tocó una canción que nadie conocía en aquella región.",
        "La compañía añadió que el avión llegará con {k} minutos de retraso \u2014 quizás más.",
    ),
)
OCR = {
    "h": ["b", "li"], "u": ["n", "ii"], "w": ["vv", "\\v"], "m": ["rn", "nn"], "o": ["0", "c"], "l": ["1", "I", "|"],
    "e": ["c", "c", "\u00e9"], "i": ["1", "l", "!"], "t": ["f", "l", "+"], "n": ["ri", "u"], "s": ["5", "a", "$"], "k": ["lc"],
    "r": ["i", "v"], "d": ["cl", "il"], "g": ["q", "9"], "b": ["6", "l)"], "a": ["o", "n", "@"], "y": ["v", "j"], "c": ["(", "o"],
}
STRAY = ["~", "\u00ac", "\u00b7", "^", "|", "*", "\u2022", "'", "\u00bb", "_", ". .", "\u00a3", "\\", "\u25a0", "} ", "-\n"]
ZERO = ["\u200b", "\u200c", "\u200d", "\u2060", "\ufeff", "\u00ad"]
CYRILLIC = "\u0430\u0441\u0435\u043e\u0440\u0445\u0443\u0456\u0458\u0455\u0410\u0412\u0415\u041d\u041a\u041c\u041e"
HOMOGLYPHS = dict(zip("aceopxyijsABEHKMO", CYRILLIC, strict=True))
SPAM = (
    "Claim your {k} dollar {brand} bonus today and double your account balance.",
    "Dear customer, your {brand} wallet has been suspended, please verify your password within {h} hours.",
    "Make money from home with the {brand} system, {name} earned {k} dollars last week.",
    "Exclusive casino offer: {h} free spins and no deposit required at {brand}.",
    "Hot investment opportunity, {brand} crypto tokens are up {h} percent since {day}.",
    "Your parcel from {brand} is waiting, pay the small customs fee to receive it.",
    "Doctors hate this simple trick, lose {h} pounds in one month with {brand} {product}.",
    "Limited time only: {product} at the lowest price, contact {name} on telegram.",
)
MENU = (
    "Home,About,About Us,Contact,Login,Register,My Account,Cart (0),Checkout,Wishlist,Blog,News,FAQ,Privacy Policy,Terms of Use,"
    "Sitemap,Search,Careers,Press,Help,Support,Forum,Gallery,Events,Newsletter,RSS,Facebook,Twitter,Instagram,Share,Print,Menu,"
    "Skip to content,Toggle navigation,Back to top,Next,Previous,Read more,Categories,Archives,Tags,Shop,Men,Women,Kids,Deutsch"
).split(",")
TAGGED = {
    "DT": ["the", "a", "this", "every"], "JJ": ADJECTIVES, "NN": NOUNS, "VBZ": ["crosses", "sees", "repairs", "follows", "sells"],
    "IN": ["near", "in", "behind", "with"], "NNP": NAMES, "RB": ["slowly", "often", "never", "quickly"], "CC": ["and", "but"],
}
TREE = "[S [NP {NNP}] [VP {VBZ} [NP {DT} {JJ} {NN}] [PP {IN} [NP {NNP}]]]]"
EVENTS = (
    "PersonX goes to PersonY's {n}", "PersonX asks PersonY for the {n}", "PersonX loses ___ in the {n}", "PersonX sees a {a} {n}",
    "PersonX gives PersonY a {n}", "PersonX leaves the {n}", "PersonX repairs PersonX's {n}", "PersonX finds PersonY's {n}",
)
RELATIONS = "xIntent xNeed xAttr xEffect xReact xWant oReact oWant oEffect HinderedBy isBefore".split()
TAILS = ("to be helpful", "none", "to thank PersonX", "happy", "to find the {n}", "gets tired", "PersonX sees the {n}", "{a}")
# fmt: on


def _slots(rng: random.Random) -> dict[str, str]:
    """Make one set of made-up values for the templates."""
    pools = {"a": ADJECTIVES, "n": NOUNS, "n2": NOUNS, "p": PLACES, "v": VERBS, "name": NAMES, "day": DAYS, "brand": BRANDS}
    numbers = {"y": (1790, 2021), "k": (12, 9800), "h": (5, 96)}
    slots = {name: rng.choice(pool) for name, pool in pools.items()} | {"product": rng.choice(PRODUCTS)}
    return slots | {name: str(rng.randint(*bounds)) for name, bounds in numbers.items()}


def _fill(rng: random.Random, templates: tuple[str, ...], count: int) -> list[str]:
    """Fill that many templates, taking each of them once before any is used again."""
    order: list[str] = []
    while len(order) < count:
        order += rng.sample(templates, len(templates))
    return [template.format(**_slots(rng)) for template in order[:count]]


def _prose(rng: random.Random, low: int, high: int) -> str:
    """Make some plain English sentences."""
    return " ".join(_fill(rng, PROSE, rng.randint(low, high)))


def _token(rng: random.Random, length: int, alphabet: str = "0123456789abcdef") -> str:
    """Make a random token, such as a hexadecimal id."""
    return "".join(rng.choices(alphabet, k=length))


def _clock(rng: random.Random) -> str:
    """Make a time of day."""
    return f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}:{rng.randint(0, 59):02d}"


def _ip(rng: random.Random) -> str:
    """Make an IPv4 address."""
    return ".".join(str(rng.randint(1, 254)) for _ in range(4))


def seo(rng: random.Random) -> str:
    """Make an SEO keyword list around one or two products."""
    products, brands = rng.sample(PRODUCTS, rng.randint(1, 2)), rng.sample(BRANDS, rng.randint(1, 3))
    phrases = []
    for _ in range(rng.randint(18, 45)):
        chances = ((BUY, 0.6), (brands, 0.7), (products, 1.0), (TAIL, 0.8), (PLACES, 0.2))
        phrases.append(" ".join(rng.choice(words) for words, chance in chances if rng.random() < chance))
    text = rng.choice([" | ", ", ", " - ", "\n", " \u2022 "]).join(phrases)
    return rng.choice([text, text.lower(), text.title()])


def ocr(rng: random.Random) -> str:
    """Make prose as a bad scan reads it: wrong letters, lost blanks, stray symbols."""
    rate, out = rng.uniform(0.08, 0.25), []
    for word in _prose(rng, 6, 14).split():
        letters = [rng.choice(OCR.get(c, [c])) if rng.random() < rate else c for c in word]
        if rng.random() < rate / 2 and len(letters) > 4:
            letters.insert(rng.randrange(1, len(letters)), rng.choice([" ", "- ", "."]))
        out.append("".join(letters) + ("" if rng.random() < rate / 3 else " "))
        if rng.random() < rate / 2:
            out.append(rng.choice(STRAY) + " ")
    return "".join(out).strip()


def _misread(text: str, codec: str) -> str:
    """Read the UTF-8 bytes of a text with a one-byte codec, and bytes it lacks as Latin-1."""
    singles = (bytes([byte]) for byte in text.encode("utf-8"))
    return "".join(single.decode(codec, "ignore") or single.decode("latin-1") for single in singles)


def mojibake(rng: random.Random) -> str:
    """Make German, French or Spanish prose whose UTF-8 was read as Latin-1 or cp1252, at times twice."""
    codec = rng.choice(["cp1252", "cp1252", "latin-1"])
    text = _misread(" ".join(_fill(rng, rng.choice(FOREIGN), rng.randint(5, 12))), codec)
    return _misread(text, codec) if rng.random() < 0.2 else text


def zero_width(rng: random.Random) -> str:
    """Make spam with zero-width characters inside its words."""
    rate, marks = rng.uniform(0.15, 0.6), rng.sample(ZERO, rng.randint(1, 3))
    text = " ".join(_fill(rng, SPAM, rng.randint(5, 14)))
    return "".join(c + rng.choice(marks) if c.isalpha() and rng.random() < rate else c for c in text)


def homoglyph(rng: random.Random) -> str:
    """Make spam with Cyrillic letters inside its Latin words."""
    rate, text = rng.uniform(0.3, 0.9), " ".join(_fill(rng, SPAM, rng.randint(5, 14)))
    return "".join(HOMOGLYPHS[c] if c in HOMOGLYPHS and rng.random() < rate else c for c in text)


def _frames(rng: random.Random, count: int) -> list[str]:
    """Make the frames of a Java stack trace."""
    package = f"com.{rng.choice(BRANDS).lower()}.{rng.choice(NOUNS)}"
    name = f"{rng.choice(NOUNS).title()}{rng.choice(['Activity', 'Service', 'Manager', 'Adapter', 'Controller'])}"
    calls = ["onCreate", "handleMessage", "dispatch", "invoke", "run", "getView", "doInBackground", "process"]
    return [f"at {package}.{name}.{rng.choice(calls)}({name}.java:{rng.randint(10, 990)})" for _ in range(count)]


def _logcat(rng: random.Random) -> list[str]:
    """Make a crash in the manner of Android's logcat."""
    pid, stamp = rng.randint(300, 29999), f"{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d} {_clock(rng)}"
    error = rng.choice(["NullPointerException", "RuntimeException", "IllegalStateException", "ClassCastException"])
    lines = ["FATAL EXCEPTION: main", f"java.lang.{error}: Unable to start activity", *_frames(rng, rng.randint(8, 18))]
    lines += ["at android.os.Looper.loop(Looper.java:137)", "at dalvik.system.NativeStart.main(Native Method)"]
    return [f"{stamp}.{rng.randint(0, 999):03d}: E/AndroidRuntime({pid}): {line}" for line in lines]


def _syslog(rng: random.Random) -> list[str]:
    """Make lines of a syslog."""
    host, month, day = rng.choice(NOUNS) + str(rng.randint(1, 40)), rng.choice(MONTHS), rng.randint(1, 28)
    texts = (
        "sshd[{}]: Failed password for root from " + _ip(rng) + " port 4{} ssh2",
        "kernel: [{}.{}] usb 1-1: new high-speed USB device number 7 using xhci_hcd",
        "CRON[{}]: (www-data) CMD (php -f /var/www/cron.php -- {} >/dev/null 2>&1)",
        "dhclient[{}]: DHCPREQUEST on eth0 to " + _ip(rng) + " port 67 (xid=0x{})",
        "systemd[1]: Started Session {} of user {}.",
    )
    times = sorted(_clock(rng) for _ in range(rng.randint(8, 22)))
    rows = [rng.choice(texts).format(rng.randint(100, 29999), rng.randint(1000, 9999)) for _ in times]
    return [f"{month} {day:2d} {time} {host} {row}" for time, row in zip(times, rows, strict=True)]


def _nginx(rng: random.Random) -> list[str]:
    """Make lines of an access log."""
    agents = ["Mozilla/5.0 (compatible; bingbot/2.0)", "curl/7.68.0", "Mozilla/5.0 (Windows NT 10.0; Win64; x64)"]
    lines, date = [], f"{rng.randint(1, 28):02d}/{rng.choice(MONTHS)}/{rng.randint(2010, 2024)}"
    for time in sorted(_clock(rng) for _ in range(rng.randint(7, 18))):
        path = f"/{rng.choice(NOUNS)}/{rng.choice(NOUNS)}.{rng.choice(['php', 'html', 'png', 'js'])}"
        request = f'"{rng.choice(["GET", "GET", "POST", "HEAD"])} {path} HTTP/1.1" {rng.choice([200, 200, 301, 404, 500])}'
        lines.append(f'{_ip(rng)} - - [{date}:{time} +0000] {request} {rng.randint(90, 90000)} "-" "{rng.choice(agents)}"')
    return lines


def _python_trace(rng: random.Random) -> list[str]:
    """Make log lines with a Python traceback and a Java cause below them."""
    lines = [f"{rng.randint(2009, 2024)}-0{rng.randint(1, 9)}-11 {_clock(rng)} ERROR", "Traceback (most recent call last):"]
    for _ in range(rng.randint(5, 11)):
        file = f"/usr/lib/python3/{rng.choice(NOUNS)}/{rng.choice(NOUNS)}.py"
        lines.append(f'  File "{file}", line {rng.randint(3, 2000)}, in {rng.choice(VERBS)}')
        lines.append(f"    self.{rng.choice(NOUNS)}.{rng.choice(NOUNS)}(*args, **kwargs)")
    lines.append(f"{rng.choice(['KeyError', 'ValueError', 'OSError'])}: '{_token(rng, 8)}'")
    return lines + [f"Caused by: java.io.IOException: {_token(rng, 12)}", *_frames(rng, rng.randint(3, 9))]


def logs(rng: random.Random) -> str:
    """Make log lines: logcat, syslog, an access log or stack traces."""
    return "\n".join(rng.choice([_logcat, _syslog, _nginx, _python_trace])(rng))


def blob(rng: random.Random) -> str:
    """Make a base64 blob, in lines or in one long line, at times with a header or a sentence before it."""
    magic = rng.choice([b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0\x00\x10JFIF", b"%PDF-1.4\n", b"PK\x03\x04", b""])
    data = base64.b64encode(magic + rng.randbytes(rng.randint(400, 2400))).decode()
    form, width = rng.random(), rng.choice([64, 72, 76])
    if form < 0.35:
        return rng.choice(["", "data:image/png;base64,", "<img src='data:image/gif;base64,", _prose(rng, 1, 2) + " "]) + data
    lines = "\n".join(data[i : i + width] for i in range(0, len(data), width))
    if form < 0.6:
        kind = rng.choice(["CERTIFICATE", "PGP MESSAGE", "PGP SIGNATURE"])
        return f"-----BEGIN {kind}-----\n{lines}\n-----END {kind}-----"
    name = f"{rng.choice(NOUNS)}{rng.randint(1, 99)}.{rng.choice(['jpg', 'pdf', 'doc', 'zip'])}"
    head = f'Content-Disposition: attachment; filename="{name}"\nContent-Transfer-Encoding: base64\n\n'
    return rng.choice([head, head, "", _prose(rng, 1, 2) + "\n"]) + lines


def template(rng: random.Random) -> str:
    """Make text whose placeholders nobody filled in."""
    lorem = (
        "Lorem ipsum dolor sit amet, consectetur adipiscing elit. ",
        "Sed do eiusmod tempor incididunt ut labore et dolore magna aliqua. ",
        "Ut enim ad minim veniam, quis nostrud exercitation ullamco laboris. ",
        "Duis aute irure dolor in reprehenderit in voluptate velit esse cillum. ",
        "Excepteur sint occaecat cupidatat non proident, sunt in culpa qui officia. ",
    )
    opening, closing = rng.choice([("{{", "}}"), ("[", "]"), ("%%", "%%"), ("<<", ">>"), ("${", "}"), ("*|", "|*")])

    def gap(match: re.Match[str]) -> str:
        name = "insert " + match[1] if opening == "[" else match[1].replace(" ", "_")
        return opening + (name if opening in ("{{", "${") else name.upper()) + closing

    skeletons = (
        "Dear @first name@ @last name@,\n\nThank you for ordering @product name@ from @company name@ on @date@. Your order "
        "@order id@ will be sent to @address line@ in @city@ within # days. If you have any questions, call @phone@ or write to "
        "@support email@.\n\nKind regards,\n@sender name@",
        "Welcome to @company name@, the first choice for @keyword@ in @city@! Our @keyword@ experts offer the best @service@ "
        "at @price@. Call @phone@ now and ask for @agent name@. @company name@ has served @city@ and @region@ for over # years.",
        "@headline@\n\n@product name@ is the easy way to @benefit@. Price: @price@ @currency@. Rating: @rating@ out of 5 by "
        "@review count@ customers. SKU @sku@. In stock: @stock@. Click to edit text block number #. Your content goes here.",
        "This agreement is made on @date@ between @party a@ of @address line@ and @party b@. @party b@ pays @amount@ within # "
        "days after @event@. Signed: @signature@ (delete as appropriate). [TODO: legal to check clause #]",
        "Hi @name@,\nmy name is @sender name@ and I am the @job title@ at @company name@. I noticed that @website@ does not rank "
        "for @keyword@. Would you have # minutes on @weekday@ to talk about @service@?\nTo unsubscribe click @unsubscribe link@.",
    )
    parts = rng.sample(skeletons, rng.randint(1, 3))
    filler = "".join(rng.choice(lorem) for _ in range(rng.randint(3, 9)))
    parts.insert(rng.randint(0, len(parts)), f"{filler}{rng.choice(PLACES)} @ref@ {rng.randint(100, 99999)}")
    return re.sub("#", lambda _: str(rng.randint(2, 400)), re.sub("@(.+?)@", gap, "\n\n".join(parts)))


def annotation(rng: random.Random) -> str:
    """Make debris of annotated data: PersonX events, brackets, tags or tuples."""
    form, count = rng.randrange(4), rng.randint(13, 24)
    events, tails = _fill(rng, EVENTS, count), _fill(rng, TAILS, count)
    if form == 0:
        return rng.choice([" ", "\n"]).join(event + "." for event in events)
    if form == 1:
        rows = [(event, rng.choice(RELATIONS), tail) for event, tail in zip(events, tails, strict=True)]
        sep = rng.choice(["\t", ", ", " | "])
        return "\n".join(f"({', '.join(map(repr, row))})" if sep == ", " else sep.join(row) for row in rows)
    if form == 2:
        joint, orders = rng.choice("_/"), ("DT JJ NN VBZ DT NN IN NNP", "NNP RB VBZ DT JJ NN", "DT NN IN NNP VBZ NNP CC NNP")
        sentences = [[f"{rng.choice(TAGGED[tag])}{joint}{tag}" for tag in rng.choice(orders).split()] for _ in range(count)]
        return "\n".join(" ".join(words) + f" .{joint}." for words in sentences)
    return "\n".join(TREE.format(**{tag: rng.choice(words) for tag, words in TAGGED.items()}) for _ in range(count))


def menu(rng: random.Random) -> str:
    """Make the menu of a site, repeated as it is on every page of a crawl."""
    entries = rng.sample(MENU, rng.randint(9, 16)) + [rng.choice(BRANDS), rng.choice(NOUNS).title()]
    sep, blocks = rng.choice([" ", " ", "\n", " | ", " > ", " \u00bb "]), []
    for page in range(rng.randint(5, 8)):
        block = [entry for entry in entries if rng.random() < 0.93]
        ends = f"Page {page + 1} of {rng.randint(9, 400)}", f"\u00a9 {rng.randint(2001, 2024)} {rng.choice(BRANDS)}"
        block.append(rng.choice(ends))
        blocks.append(sep.join(block))
    return "\n".join(blocks)


def spun(rng: random.Random) -> str:
    """Make one phrase told again and again with tiny changes, as an article spinner does."""
    product, place = rng.choice(PRODUCTS), rng.choice(PLACES)
    parts = [
        ["If you are looking for", "When you need", "If you want to find", "Searching for", "Should you require"],
        ["the best", "the very best", "the finest", "a great", "the most trusted", "a top quality"],
        [product, f"{product} deal", f"{product} offer", f"{product} service"],
        [f"in {place}", f"near {place}", f"in the {place} area", f"around {place}"],
        ["you have come to the right place.", "you are in the right place.", "this is the right place.", "look no further."],
    ]
    keep, out = rng.uniform(0.3, 0.7), []
    now = [rng.choice(options) for options in parts]
    for _ in range(rng.randint(8, 15)):
        now = [old if rng.random() < keep else rng.choice(options) for old, options in zip(now, parts, strict=True)]
        out.append(" ".join(now))
    return " ".join(out) + f" Call {rng.randint(200, 999)}-{rng.randint(1000, 9999)} today."


def _script(rng: random.Random) -> str:
    """Make a piece of minified JavaScript."""
    out = f"!function(e,t){{var n=e.{rng.choice(NOUNS)}||{{}};"
    for _ in range(rng.randint(8, 20)):
        (a, b, c), noun = rng.sample("abcdefghikmoprsuvw", 3), rng.choice(NOUNS)
        forms = (
            f"function {a}({b},{c}){{return {b}&&{c}.{noun}?{b}:void 0}}",
            f"var {a}={rng.randint(0, 999)},{b}=t.getElementById('{noun}-{_token(rng, 5)}');",
            f"for(var {a}=0;{a}<n.length;{a}++)n[{a}].{noun}&&{b}.push({c}[{a}]);",
            f"{a}.addEventListener('click',function({b}){{{b}.preventDefault(),{c}.{noun}(!0)}});",
        )
        out += rng.choice(forms)
    return out + "}(window,document);"


def _style(rng: random.Random) -> str:
    """Make a piece of minified CSS."""
    rules = []
    for _ in range(rng.randint(12, 30)):
        size, state = rng.randint(0, 48), rng.choice(["", ":hover", " li>a", ":after"])
        body = rng.choice([f"margin:{size}px 0;padding:0", f"color:#{_token(rng, 6)}!important", f"font:{size}px Arial"])
        rules.append(f"{rng.choice('.#')}{rng.choice(NOUNS)}-{rng.choice(NOUNS)}{state}{{{body}}}")
    return "".join(rules)


def _dump(rng: random.Random) -> str:
    """Make a JSON dump on one line."""
    rows = []
    for _ in range(rng.randint(5, 14)):
        row = {"id": rng.randint(1, 10**6), "slug": f"{rng.choice(NOUNS)}-{rng.choice(NOUNS)}", "hash": _token(rng, 16)}
        row |= {"price": rng.randint(100, 9999) / 100, "tags": rng.sample(NOUNS, 2), "active": rng.random() < 0.5, "parent": None}
        rows.append(row)
    return json.dumps({"status": "ok", "page": rng.randint(1, 99), "items": rows}, separators=(",", ":"))


def minified(rng: random.Random) -> str:
    """Make prose with minified JavaScript, CSS or a JSON dump in the middle of it."""
    code = "".join(make(rng) for make in rng.sample([_script, _style, _dump], rng.randint(1, 2)))
    glue = rng.choice([" ", "\n", "\n\n"])
    return _prose(rng, 2, 5) + glue + code + glue + _prose(rng, 2, 5)


# fmt: off
MAKERS: dict[str, Callable[[random.Random], str]] = {
    "seo": seo, "ocr": ocr, "mojibake": mojibake, "zero_width": zero_width, "homoglyph": homoglyph, "logs": logs,
    "base64": blob, "template": template, "annotation": annotation, "menu": menu, "spun": spun, "minified": minified,
}
# fmt: on
KINDS = tuple(MAKERS)


def planted(kind: str, rng: random.Random) -> str:
    """Make one junk text of the kind named."""
    return MAKERS[kind](rng)
