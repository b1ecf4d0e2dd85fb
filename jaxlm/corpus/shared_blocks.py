"""What the pages of one site share: a block that a tenth of a sample has at one place is furniture, not text.

A site is a host (of pages in WARC files) or the topmost folder of pages. Fewer than 20 pages tell nothing. The sample is chosen
by a hash of the pages' names, so that it depends on no worker.
"""

import collections
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from jaxlm.corpus import page
from jaxlm.corpus.sources import registry
from jaxlm.corpus.sources.base import Part, SourceSpec, SourceStats, Unit
from jaxlm.corpus.sources.base import site_of as site_of_url
from jaxlm.corpus.stage import Document

T = TypeVar("T")

LEAST_PAGES = 20  # of a site
_SAMPLE = 200  # pages of a site
_SAMPLES = 20_000  # pages of a source, so that a source of many sites is planned in minutes
_ARCHIVES = 4  # WARC files of a source that are looked at: each is read twice
_TASK_PAGES = 100
_SHARE = 0.1  # of the sample
_MOST_CHARS = 2000  # of a block: a longer one is text, or holds blocks that are shared
_BLOCKS = "div, section, header, footer, aside, nav, ul, ol, form, p, table, center"
_EDGE = 3  # a block is one of the first or last so many in its parent: a remark that comes back stands anywhere
_CLASS = re.compile(r"[A-Za-z_][\w-]*")
_TEXT = "h1, h2, h3, h4, h5, h6, dt, dd, pre, code, blockquote"  # shared parts of texts: "Synopsis", "Returns None."
_INSIDE = f"{_TEXT}, p, li, td"

# Selector of a place -> digests of the texts that are furniture there.
Shared = Mapping[str, frozenset[str]]
BySite = Mapping[str, Shared]
Sample = Sequence[Part]  # some pages of a site, or WARC files


def site_of(metadata: Mapping[str, str]) -> str:
    """Returns a page's topmost folder ("" for the source's own), or the host of a page without a path."""
    return _folder(metadata["path"]) if "path" in metadata else metadata.get("site", "")


def samples(units: Iterable[Unit]) -> Iterator[list[Sample]]:
    """Yields what each task looks at: some sites of a source, or its WARC files."""
    folders, archives = collections.defaultdict(list), []
    for part in (part for unit in units for part in unit.parts):
        if part.format == "html":
            folders[_folder(part.name)].append(part)
        elif part.format == "warc":
            archives.append(part)
    task = []
    for sample in _by_hash(folders, lambda part: part.name):
        task.append(sample)
        if sum(map(len, task)) >= _TASK_PAGES:
            yield task
            task = []
    if task:
        yield task
    if archives:
        yield [sorted(archives, key=lambda part: _hash(part.name))[:_ARCHIVES]]


def find(spec: SourceSpec, samples: Iterable[Sample]) -> BySite:
    """Returns for each site of a source what the pages of its sample share; leaves out sites whose pages share nothing."""
    counters: dict[str, _Counter] = collections.defaultdict(_Counter)
    for parts in samples:
        if parts[0].format == "warc":
            pages = _pages_of_hosts(parts, spec)
        else:
            pages = (d for part in parts for d in registry.reader(part.format).read(part, spec, SourceStats()))
        for document in pages:
            counters[site_of(document.metadata)].add(document.text)
    by_site = {site: counter.shared() for site, counter in counters.items()}
    return {site: shared for site, shared in by_site.items() if shared}


def _pages_of_hosts(archives: Sequence[Part], spec: SourceSpec) -> Iterator[Document]:
    warc, ids_of = registry.reader("warc"), collections.defaultdict(list)
    id_of = {url: doc_id for part in archives for doc_id, url in warc.urls(part)}  # of a page's captures the last
    for url, doc_id in id_of.items():
        if host := site_of_url(url):
            ids_of[host].append(doc_id)
    chosen = {doc_id for ids in _by_hash(ids_of, str) for doc_id in ids}
    for part in archives if chosen else ():
        for document in warc.read(part, spec, SourceStats(), only=chosen):
            if document.metadata["format"] == "html":
                yield document


def _folder(path: str) -> str:
    return path.partition("/")[0] if "/" in path else ""


def _hash(name: str) -> bytes:
    return hashlib.blake2b(name.encode()).digest()


def _by_hash(pages_of: Mapping[str, Sequence[T]], name: Callable[[T], str]) -> Iterator[Sequence[T]]:
    """Yields a sample of the pages of each site that has enough of them."""
    left = _SAMPLES
    for _, pages in sorted(pages_of.items()):
        if len(pages) >= LEAST_PAGES and left > 0:
            sample = sorted(pages, key=lambda each: _hash(name(each)))[:_SAMPLE]
            left -= len(sample)
            yield sample


class _Counter:
    """Counts the pages of a site that have a block at a place."""

    def __init__(self):
        self._pages = 0
        self._with: collections.Counter[tuple[str, str]] = collections.Counter()

    def add(self, html: str) -> None:
        tree = page.parse(html)[1]
        body = tree.body
        if body is None or body.tag is None or page.is_too_deep(tree):
            return
        self._pages += 1
        self._with.update({block for element in _blocks(body) if all(block := (_place(element), _digest(element)))})

    def shared(self) -> Shared:
        if self._pages < LEAST_PAGES:  # of a host whose other records are images, say
            return {}
        places = collections.defaultdict(set)
        for (place, digest), pages in self._with.items():
            if pages >= max(3, _SHARE * self._pages):
                places[place].add(digest)
        return {place: frozenset(digests) for place, digests in sorted(places.items())}


def remove(body, shared: Shared) -> None:
    """Removes the blocks that a page shares with its site."""
    for element in body.query_selector_all(", ".join(shared)).values() if shared else ():
        digests = shared.get(_place(element)) if element.parent is not None else None
        if digests and _is_at_edge(element) and _digest(element) in digests:
            element.decompose()


def _blocks(body) -> list:
    blocks = body.query_selector_all(_BLOCKS).values()
    return [element for element in blocks if element.parent.closest(_INSIDE) is None and _is_at_edge(element)]


def _is_at_edge(element) -> bool:
    for side in ("previous_element_sibling", "next_element_sibling"):
        node, number = getattr(element, side), 0
        while node is not None and number < _EDGE:
            node, number = getattr(node, side), number + 1
        if number < _EDGE:
            return True
    return False


def _place(element) -> str:
    """Returns a selector of the element's place: tags and classes from the body down; "" if a tag is no name in CSS."""
    steps = []
    while element is not None and element.tag != "body":
        if not _CLASS.fullmatch(element.tag):
            return ""
        names = (name for name in (element.getattr("class") or "").split() if _CLASS.fullmatch(name))
        steps.append(element.tag + "".join(f".{name}" for name in names))
        element = element.parent
    return " > ".join(["body", *reversed(steps)])


def _digest(element) -> str:
    """Returns a digest of an element's words; "" if it has none, holds a part of a text, or is long."""
    text = element.text
    if len(text) > _MOST_CHARS or (element.query_selector(_TEXT) is not None and not _is_linked(element)):
        return ""
    words = " ".join(text.replace(page.SAVE, "").split())
    return hashlib.blake2b(words.encode("utf-8", "replace"), digest_size=8).hexdigest() if words else ""


def _is_linked(element) -> bool:
    """True if at least half of the characters are in links, as in a menu under a heading."""
    return 2 * page.linked_chars(element) >= len(element.text)
