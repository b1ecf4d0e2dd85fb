"""Removes what careless HTML stripping leaves in plain text: entities, tags, attributes, styles, scripts, menus, notices.

In doubt the rules leave debris in: a text about HTML keeps the tags that it shows, and code stays. After C4 (Raffel et
al. 2020), RefinedWeb (Penedo et al. 2023) and Dolma (Soldaini et al. 2024).
"""
# ruff: noqa: RUF001 - words of menus in other scripts

import html
import itertools
import re

from jaxlm.corpus.stage import Document, Edits, Remove, Stage

_MENTIONS = 1  # of HTML, CSS ...: a text with more mentions is about HTML, and keeps its tags and entities
_MENU_LINES = 3  # of menus' words, in a run of short lines
_MENU_CHARS = 30  # of a short line
_NOTICE_CHARS = 200  # a longer line is no notice

_FENCED = re.compile(r"^[ \t]*(?P<fence>```+|~~~+)[^\n]*\n(?:.*?^[ \t]*(?P=fence)[`~]*[ \t]*$|.*)", re.M | re.S)
_INLINE = re.compile(r"(`[^`\n]+`)")

# Words by which a text shows that it is about HTML (one may be chance), or a line that it is about a tag.
_ABOUT = re.compile(
    r"(?<![<\w./-])(?:x?html5?|xml|svg|css|javascript|jquery|jsx|markup|angle brackets?|docbook)(?![\w(=/-]|\.\w)", re.I
)
_BESIDE = re.compile(
    r"(?<![<\w./-])(?:tags?|elements?|attributes?|entity|entities|escap(?:e|ed|es|ing))(?![\w(=/-])", re.I
)

_ENTITY = re.compile(r"&(?:amp;)*(?:#\d{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});|&(?:amp;)?nbsp(?![\w;])")

_BLOCKS = (
    "address article aside blockquote body center dd div dl dt figcaption figure footer form h1 h2 h3 h4 h5 h6 head"
    " header hr html li main nav ol option p pre section select table tbody tfoot thead title tr ul br"
)
_INLINES = (
    "a abbr acronym b big button cite code del em embed fieldset font i iframe img input ins kbd label link meta"
    " noscript object q s samp script small span strike strong style sub sup td th tt u var video wbr"
)
_LINES = frozenset(_BLOCKS.split())
_NAMES = "|".join(sorted(f"{_BLOCKS} {_INLINES}".split(), key=len, reverse=True))
_ATTRIBUTES = r"(?:\s+[a-zA-Z][\w:.-]*(?:\s*=\s*(?:\"[^\"<>\n]*\"|'[^'<>\n]*'|[^\s\"'<>=]+))?)*"
_TAG = re.compile(rf"<(?P<end>/?)(?P<name>{_NAMES})(?P<rest>{_ATTRIBUTES}\s*/?)>", re.I)
_ALONE = {"br", "hr", "wbr"}  # have no end tag, and are hardly names of types or placeholders (unlike `cp <input>`)
_RAISED = re.compile(r"<(su[pb])>([\w+-]{1,12})</\1>", re.I)
# Elements that are removed with their content: their beginning and their end.
_HIDDEN = {
    "script": (re.compile(r"<script\b[^<>\n]*>", re.I), re.compile(r"</script\s*>", re.I)),
    "style": (re.compile(r"<style\b[^<>\n]*>", re.I), re.compile(r"</style\s*>", re.I)),
    "comment": (re.compile(r"<!--"), re.compile(r"-->")),
    "doctype": (re.compile(r"<!doctype\b", re.I), re.compile(r">")),
    "cdata": (re.compile(r"(?://)?<!\[CDATA\["), re.compile(r"(?://)?\]\]>")),
}
_FOREIGN = re.compile(rf"</(?!(?:{_NAMES})\s*>)[a-zA-Z][\w:.-]*\s*>", re.I)  # of XML, JSX: the tags are the text
_ENDS = re.compile(r"</([a-zA-Z]\w*)\s*>")
_ATTRIBUTE = (
    r"(?:class|id|href|src|style|target|rel|alt|width|height|align|valign|border|cellpadding|cellspacing|colspan|"
    r"bgcolor|onclick|onload|data-[\w-]+|aria-[\w-]+)=(?:\"[^\"\n]*\"|'[^'\n]*')"
)
_TORN = re.compile(rf"(?<![\w,(<-])(?:</?\w+ +)?{_ATTRIBUTE}(?:(?: +{_ATTRIBUTE})+ *(?:/?>|(?=\s|$))| */?>|$)", re.M)

_EQUALS = re.compile("=[\"']")
_STYLES = re.compile(r"[;}]\s*(?:\n|\Z)")

_RULE = re.compile(
    r"^\s*(?!(?:return|else|do|try|struct|class|enum|export|default|case|union)\b)"
    r"(?:@media[^{};]*|[.#*:a-z][^{};=()]*)\{"
)
_DECLARATION = re.compile(
    r"(?:^|[{;])\s*(?:-\w+-)?(?:color|margin|padding|font|display|width|height|background|border|float|clear|position|"
    r"top|left|text-align|text-decoration|line-height|overflow|z-index|min-width|max-width|visibility)[\w-]*\s*:"
    r"[^;{}]+[;}]"
)
_TRACKER = re.compile(
    r"\b_ga[qt]\b|GoogleAnalyticsObject|\bdataLayer\b|\bgtag\(|\bgoogletag\b|\badsbygoogle\b|\bfbq\(|\b__tcfapi\b|"
    r"\bdocument\.write\(|\bgoogle_ad_\w+\s*=|\baddthis_\w+\s*="
)
_CODE_ENDS = re.compile(r"[;{}]\s*$|^\s*[})\]]|^\s*//")

_SOCIAL = "facebook|twitter|x|instagram|youtube|linkedin|pinterest|whatsapp|reddit|tumblr|telegram|google\\+?|e-?mail"
_MENU = frozenset(
    line.strip()
    for line in """
    home, homepage, home page, about, about us, contact, contact us, contacts, get in touch, login, log in, sign in,
    sign up, sign out, log out, logout, register, join, join us, join now, my account, account, profile, search,
    sitemap, site map, privacy, privacy policy, cookie policy, cookies, terms, terms of use, terms of service,
    terms and conditions, terms & conditions, legal, legal notice, disclaimer, imprint, accessibility, faq, faqs, help,
    support, blog, news, events, shop, store, cart, basket, checkout, wishlist, products, services, solutions, pricing,
    portfolio, gallery, careers, jobs, press, media, advertise, advertising, subscribe, newsletter, donate, menu,
    main menu, toggle navigation, navigation, skip to content, skip to main content, skip navigation, categories,
    archives, archive, tags, recent posts, recent comments, rss, feed, feedback, forum, forums, members, memberlist,
    downloads, download, documentation, docs, team, our team, testimonials, partners, next, previous, prev, back,
    back to top, top, share, follow us, print, email, facebook, twitter, instagram, youtube, linkedin, pinterest,
    startseite, kontakt, impressum, datenschutz, anmelden, registrieren, suche, über uns, agb, hilfe, warenkorb,
    accueil, à propos, mentions légales, connexion, s'inscrire, recherche, panier, plan du site, aide,
    inicio, contacto, acerca de, aviso legal, iniciar sesión, buscar, política de privacidad, quiénes somos,
    главная, контакты, о нас, войти, регистрация, поиск, новости,
    首页, 首頁, 关于我们, 關於我們, 联系我们, 聯絡我們, 登录, 登入, 注册, 註冊,
    搜索, 新闻, 新聞, 网站地图, 隐私政策, ホーム, トップページ, 会社概要, お問い合わせ,
    ログイン, 新規登録, サイトマップ, プライバシーポリシー, 検索, ニュース
    """.replace("\n", " ").split(",")
)
_ROOTS = frozenset(
    ("home", "homepage", "main page", "index", "start", "startseite", "accueil", "inicio", "главная")
).union(("首页", "首頁", "ホーム", "トップページ"))
_FIRST_WORDS = frozenset(entry.split()[0] for entry in _MENU) | {"you", "main", "start", "index"}
_SPLIT = re.compile(r"\s*(?:\||\u203a|\u00bb|\u00b7|\u2022|::)\s*|\s+[/>\u2192]\s+|\t+|\s{3,}")
_CRUMBS = re.compile(r"\s>\s|\u203a|\u00bb|\u2192|\s/\s|::")
_HERE = re.compile(r"^you are here:?\s*", re.I)
_ROW = re.compile("(?:{0})(?:\\s+(?:{0})){{3,}}".format("|".join(map(re.escape, sorted(_MENU, key=len, reverse=True)))))
_BULLET = re.compile(r"^\s*(?:[-*+\u2022\u00b7\u25aa\u25cf]\s+)?")
_NO_MENU = re.compile(r"[.!?:;,\u3002\uff01\uff1f]$|^#")

_NOTICE = re.compile(
    "(?:"
    + "|".join(
        (
            r"(?:please )?share (?:this|on|via|with)(?: (?:article|post|page|story|with|your|friends|on|via|:|this|and|"
            rf"{_SOCIAL}|[,|/]))*",
            rf"(?:please )?(?:follow|like|join|find) us (?:on|at) (?:{_SOCIAL})\b.{{0,60}}",
            r"(?:click here to )?(?:tweet|pin it|print this(?: page| article| post)?)(?: this| share| like)*",
            r"email this(?: page| article| post| to a friend)?",
            r"(?:(?:this|our) (?:web ?)?site|we(?: and our partners)?)(?: also)? uses?(?: \w+)? cookies\b(?=.*\b(?:experience|"
            r"site|website|browsing|consent|agree|accept|policy|analy[sz]\w+|traffic|ads?|advert\w*|services?)\b).*",
            r"by (?:continuing|using|browsing|clicking|closing)\b(?=.*\b(?:cookies?|(?:web ?)?site)\b).{0,80}"
            r"\byou (?:agree|accept|consent)\b.*",
            r"(?:accept|reject|allow|manage|decline)(?: all)? (?:cookies|cookie (?:settings|preferences))",
            r"(?:please )?(?:subscribe|sign up) (?:to|for) (?:our|the|this|my) (?:\w+ ){0,3}(?:newsletters?|mailing list|"
            r"e-?mails?|channel|feed|rss(?: feed)?|blog|updates)\b.{0,80}",
            r"enter your e-?mail(?: address)?\b.{0,80}",
            r"get .{3,60}\b(?:to|in) your (?:inbox|e-?mail)\b.{0,60}",
            r"your e-?mail address will not be published\b.{0,60}",
            r"(?:leave|post|add) a (?:comment|reply)(?: cancel reply)?",
            r"skip to (?:the )?(?:main )?(?:content|navigation|search|footer)",
            r"back to (?:the )?top(?: of (?:the )?page)?",
            r"(?:(?:\u00a9|\(c\)|copyright) *)+.{0,100}\ball rights reserved\b.{0,40}",
            r"(?:proudly )?powered by (?:wordpress|drupal|joomla|phpbb|vbulletin|blogger|shopify|squarespace|mediawiki|"
            r"discourse|disqus|simple machines)\b.{0,60}",
            r"(?:please enable|you need to enable|enable) javascript\b.{0,80}",
            r"(?:it (?:seems|looks like) )?(?:your browser (?:does not support|has disabled)|javascript (?:is (?:disabled|"
            r"required|not enabled)|must be enabled))\b.{0,80}",
            r"advertise?ment|sponsored(?: content| links?)?|continue reading below",
            r"(?:continue reading|(?:read|learn|view|show|load) more)",
            r"loading(?: comments)?(?:\.\.\.|\u2026)",
        )
    )
    + r")\s*[.!:\u2026\u00bb\u2192>|]*",
    re.I,
)
# A notice begins with one of these words: for nearly all lines the first word rules a notice out.
_NOTICE_WORDS = frozenset(
    """
    please share follow like join find click tweet pin print email this our we by accept reject allow manage decline
    subscribe sign enter get your leave post add skip back \u00a9 (c) copyright proudly powered you enable it javascript
    advertisement advertisment sponsored continue read learn view show load loading loading... loading\u2026
    """.split()  # noqa: SIM905
)


class Debris(Stage):
    """Removes debris of HTML from texts; from texts made by the stage `html`, only menus, notices. Formats code, html pass."""

    def apply(self, document: Document, edits: Edits) -> Remove | None:
        if document.metadata.get("format") in ("code", "html"):
            return None
        # Even parts are text; odd ones are fenced blocks, which stay.
        parts = _fences(document.text)
        parts[::2] = [_without_lines(part, edits) for part in parts[::2]]
        texts = parts[::2]
        if document.metadata.get("from") != "html" and any(map(_may_have_markup, texts)):
            mentions = sum(1 for t in texts for _ in _ABOUT.finditer(t))
            if mentions <= _MENTIONS and not any("</" in t and _FOREIGN.search(t) for t in texts):
                parts[::2] = [_without_markup(t, edits) for t in texts]
        document.text = "".join(parts)
        return None


def _without_lines(text: str, edits: Edits) -> str:
    """Returns the text without lines that are menus, breadcrumbs or notices."""
    lines = text.split("\n")
    gone: set[int] = set()
    run: list[tuple[int, bool]] = []  # short lines in a row, and whether each is a menu's
    for i, line in enumerate(lines):
        if not line or line.isspace():
            continue
        short = False
        if len(line) <= _NOTICE_CHARS + 100:
            bare = line.strip()
            if not bare[0].isalnum():
                bare = _BULLET.sub("", bare)
            low = bare.lower()
            first = low.split(None, 1)[0] if bare else ""
            notice = first in _NOTICE_WORDS and len(bare) <= _NOTICE_CHARS and _NOTICE.fullmatch(bare)
            menu = (
                (first in _FIRST_WORDS or low in _MENU) and len(bare) <= _NOTICE_CHARS and not notice and _is_row(low)
            )
            if notice or menu:
                gone.add(i)
                edits["notice" if notice else "menu"] += 1
                continue
            short = len(bare) <= _MENU_CHARS and not _NO_MENU.search(bare)
        if short:
            run.append((i, low in _MENU))
        elif run:
            _end_run(run, gone, edits)
    _end_run(run, gone, edits)
    return "\n".join(line for i, line in enumerate(lines) if i not in gone) if gone else text


def _end_run(run: list[tuple[int, bool]], gone: set[int], edits: Edits) -> None:
    """Ends a run of short lines: removes its first to its last menu line, if three or more, and half of them, are a menu's."""
    hits = [k for k, (_, hit) in enumerate(run) if hit]
    if len(hits) >= _MENU_LINES and 2 * len(hits) >= hits[-1] - hits[0] + 1:
        gone.update(i for i, _ in run[hits[0] : hits[-1] + 1])
        edits["menu"] += hits[-1] - hits[0] + 1
    run.clear()


def _without_markup(text: str, edits: Edits) -> str:
    """Returns the text without tags, torn attributes, style sheets and scripts of trackers, with entities decoded."""
    if "<" in text:
        for name, (begin, end) in _HIDDEN.items():
            text = _cut(text, begin, end, name, edits)
    if _STYLES.search(text):
        text = _without_styles(text, edits)
    tags = ("<" in text and _TAG.search(text)) or (_EQUALS.search(text) and _TORN.search(text))
    entities = "&" in text and _ENTITY.search(text)
    if not tags and not entities:
        return text
    ended = {name.lower() for name in _ENDS.findall(text)} if tags else set()
    out, shown = [], False
    for line in text.split("\n"):
        if not line.strip():
            shown = shown and bool(out) and out[-1].rstrip().endswith(":")
        elif not shown and ("<" in line or "&" in line or _EQUALS.search(line)) and not _BESIDE.search(line):
            line = _without_markup_in(line, ended, bool(entities), edits)
            if line is None:
                continue
        if line.rstrip().endswith(":"):  # what follows is shown: an example
            shown = True
        out.append(line)
    return "\n".join(out)


def _without_markup_in(line: str, ended: set[str], entities: bool, edits: Edits) -> str | None:
    """Returns a line without tags, with entities decoded; None if only tags were in it."""
    pieces = _INLINE.split(line) if "`" in line else [line]
    before = edits.total()
    pieces[::2] = [_without_tags(piece, ended, edits) for piece in pieces[::2]]
    changed = edits.total() > before
    if entities:
        pieces[::2] = [_unescaped(piece, edits) for piece in pieces[::2]]
    line = "".join(pieces)
    if not changed:
        return line
    return "\n".join(part.strip() for part in line.split("\n") if part.strip()) or None


def _may_have_markup(text: str) -> bool:
    """Returns False if the text surely holds no markup, which is true for most texts: a quick test."""
    return (
        ("<" in text and ("<!" in text or _TAG.search(text) is not None))
        or ("&" in text and _ENTITY.search(text) is not None)
        or _EQUALS.search(text) is not None
        or _STYLES.search(text) is not None
    )


def _fences(text: str) -> list[str]:
    """Splits a text into [text, fenced block, text, ..., text]."""
    if "```" not in text and "~~~" not in text:
        return [text]
    parts, end = [], 0
    for match in _FENCED.finditer(text):
        parts += [text[end : match.start()], match[0]]
        end = match.end()
    return [*parts, text[end:]]


def _is_row(low: str) -> bool:
    """Returns True if a line, in lower case, is a breadcrumb or a row of a menu."""
    here = _HERE.sub("", low)
    parts = [part for part in _SPLIT.split(here) if part]
    if len(parts) >= 3 and not low.endswith((".", ";", ",")):
        if parts[0] in _ROOTS and _CRUMBS.search(here):
            return all(len(part.split()) <= 6 for part in parts[:-1])
        hits = sum(part in _MENU for part in parts)
        return hits >= 3 and 2 * hits >= len(parts)
    return (len(parts) == 2 and here != low) or (len(low) <= 200 and _ROW.fullmatch(low) is not None)


def _cut(text: str, begin: re.Pattern, end: re.Pattern, name: str, edits: Edits) -> str:
    """Returns the text without the parts from a `begin` to its `end`; a `begin` without an end stays. Takes linear time."""
    out, at = [], 0
    while (start := begin.search(text, at)) and (stop := end.search(text, start.end())):
        out.append(text[at : start.start()])
        at = stop.end()
        edits[name] += 1
    return "".join([*out, text[at:]]) if out else text


def _without_styles(text: str, edits: Edits) -> str:
    """Returns the text without runs of lines that are a style sheet or that call a tracker."""
    out: list[str] = []
    for looks_like_code, lines in itertools.groupby(text.split("\n"), _looks_like_code):
        run = list(lines)
        if looks_like_code and (kind := _kind_of_code(run)):
            edits[kind] += len(run)
        else:
            out += run
    return "\n".join(out)


def _looks_like_code(line: str) -> bool:
    return ("{" in line or ";" in line or "}" in line) and bool(_CODE_ENDS.search(line) or _RULE.match(line))


def _kind_of_code(lines: list[str]) -> str:
    """Returns "style" for lines of a style sheet, "script" for lines that call a tracker, "" for other code."""
    rules, declarations = any(map(_RULE.match, lines)), sum(map(bool, map(_DECLARATION.search, lines)))
    if (rules and declarations) or declarations >= 3:
        return "style"
    return "script" if any(map(_TRACKER.search, lines)) else ""


def _without_tags(piece: str, ended: set[str], edits: Edits) -> str:
    if "<" in piece and _RAISED.search(piece):
        piece, raised = _RAISED.subn(lambda m: ("^" if m[1].lower() == "sup" else "_") + m[2], piece)
        edits["tag"] += raised

    def drop(match: re.Match) -> str:
        name = match["name"].lower()
        rest = match["rest"].strip(" /")
        if rest and "=" not in rest:  # <title of the page>: to be filled in
            return match[0]
        if not rest and not match["end"] and name not in _ALONE and name not in ended:
            return match[0]
        edits["tag"] += 1
        return "\n" if name in _LINES else " " if name in ("td", "th") else ""

    if "<" in piece:
        piece = _TAG.sub(drop, piece)
    if _EQUALS.search(piece):
        piece, torn = _TORN.subn("", piece)
        if torn:
            edits["attribute"] += torn
    return piece


def _unescaped(piece: str, edits: Edits) -> str:
    def character(match: re.Match) -> str:
        text = match[0] if match[0].endswith(";") else f"{match[0]};"
        for _ in range(text.count("amp;") + 1):
            text = html.unescape(text)
        text = text.replace("\u00a0", " ")
        if (text.startswith("&") and len(text) > 1) or not text.isprintable():
            return match[0]
        edits["entity"] += 1
        return text

    return _ENTITY.sub(character, piece) if "&" in piece else piece
