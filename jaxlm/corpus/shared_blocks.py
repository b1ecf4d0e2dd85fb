"""What the pages of one site share: a block that a tenth of a sample has at one place is furniture, not text.

A site is the topmost folder of pages; a folder of fewer than 20 pages tells nothing about its pages. The sample is chosen by
a hash of the pages' paths, so that it depends on no worker.
"""

import collections
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jaxlm.corpus import page
from jaxlm.corpus.sources import registry
from jaxlm.corpus.sources.base import Part, SourceSpec, SourceStats, Unit

LEAST_PAGES = 20  # of a site
_SAMPLE = 200  # pages of a site
_SAMPLES = 20_000  # pages of a source, so that a source of many sites is planned in minutes
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
Sample = tuple[str, Sequence[Part]]  # a site, some of its pages


def site_of(path: str) -> str:
    """Returns the topmost folder of a page; "" for a page in the source's own folder."""
    return path.partition("/")[0] if "/" in path else ""


def samples(units: Iterable[Unit]) -> Iterator[list[Sample]]:
    """Yields what each task looks at: some sites of a source."""
    by_site = collections.defaultdict(list)
    for part in (part for unit in units for part in unit.parts if part.format == "html"):
        by_site[site_of(part.name)].append(part)
    left, task = _SAMPLES, []
    for site, parts in sorted(by_site.items()):
        if len(parts) < LEAST_PAGES or left <= 0:
            continue
        sample = sorted(parts, key=lambda part: hashlib.blake2b(part.name.encode()).digest())[:_SAMPLE]
        left -= len(sample)
        task.append((site, sample))
        if sum(len(pages) for _, pages in task) >= _TASK_PAGES:
            yield task
            task = []
    if task:
        yield task


def find(spec: SourceSpec, samples: Iterable[Sample]) -> BySite:
    """Returns for each site of a source what the pages of its sample share; leaves out sites whose pages share nothing."""
    read = registry.reader("html").read
    by_site = {
        site: _shared(document.text for part in pages for document in read(part, spec, SourceStats()))
        for site, pages in samples
    }
    return {site: shared for site, shared in by_site.items() if shared}


def _shared(pages: Iterable[str]) -> Shared:
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    number = 0
    for text in pages:
        tree = page.parse(text)[1]
        body = tree.body
        if body is None or body.tag is None or page.is_too_deep(tree):
            continue
        number += 1
        counts.update({block for element in _blocks(body) if all(block := (_place(element), _digest(element)))})
    places = collections.defaultdict(set)
    for (place, digest), pages_with in counts.items():
        if pages_with >= max(3, _SHARE * number):
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
