"""Recipes for `jaxlm prepare DIR --preset=docs|web|code|books`, and a start for a config of one's own.

    from jaxlm.configs import base, presets


    def get_config():
        c = base.get_config()
        c.data.dir = "data/handbook"
        stages = presets.docs(c)  # sets the limits in c.prepare.stages
        c.prepare.sources.handbook = base.source("handbook", stages, weight=2.0)
        c.prepare.sources.wiki = base.source("wiki.xml.bz2", stages)
        return c

A recipe sets its limits in `prepare.stages`, so that `--config.prepare.stages.KEY=VALUE` changes them. All four hold for any
mixture of formats: the stage `html` looks at pages only, `code` at source files only, and the rules for prose never at those.
"""

from ml_collections import ConfigDict

# Of a folder: what belongs to tools, to versions, and to a manual's pages rather than to its text.
TOOLS = (".*", "node_modules", "__pycache__")
PAGES = ("_static", "_sources", "_images", "*.css", "*.js")


def docs(c: ConfigDict) -> tuple[str, ...]:
    """Manuals, references, wikis, notes: pages that are short, all code or tables, or repeat themselves stay."""
    language = c.prepare.stages.language
    language.min_score = 0.9  # below it a language is a guess, and the page stays
    language.keep_doubtful = True
    repetition = c.prepare.stages.gopher_repetition
    for limit in repetition:  # a page of one line a hundred times is no manual; an index, a table of codes is
        repetition[limit] = 0.9
    c.prepare.stages.html.min_chars = 20
    c.prepare.stages.near.threshold = 0.8  # pages on krb5_encrypt and krb5_decrypt are no copies
    c.prepare.stages.junk.patterns = (
        "annotation",
        "chat_tokens",
        "log_run",
        "blob",
    )  # whole lines, outside code and tables
    return (
        "html",
        "unicode",
        "debris",
        "language",
        "gopher_repetition",
        "code",
        "pii",
        "junk",
        "exact",
        "near",
        "lines",
    )


def web(c: ConfigDict) -> tuple[str, ...]:
    """Pages of many hands, such as crawls: the rules of Gopher, C4 and FineWeb, as FineWeb has them."""
    c.prepare.stages.junk.patterns = (
        *("annotation", "chat_tokens", "unk", "lorem", "assistant", "log", "blob"),
        *("invisible", "homoglyph", "mojibake"),
    )
    rules = ("language", "gopher_repetition", "gopher_quality", "c4", "fineweb")
    return ("html", "unicode", "debris", *rules, "code", "pii", "junk", "exact", "near", "lines")


def code(c: ConfigDict) -> tuple[str, ...]:
    """Source trees: files that a person wrote; what stands beside them, such as READMEs, is only mended."""
    return ("html", "unicode", "debris", "code", "pii", "junk", "exact", "near")


def books(c: ConfigDict) -> tuple[str, ...]:
    """Long texts: nothing is judged by its form but what a scanner garbled; names and numbers stay."""
    c.prepare.stages.language.keep_doubtful = True
    quality = c.prepare.stages.gopher_quality
    for limit in quality:  # off, but for letters
        quality[limit] = () if limit == "stop_words" else type(quality[limit])(0)
    quality.min_alphabetic_words = 0.6
    return ("html", "unicode", "debris", "language", "gopher_quality", "code", "junk", "exact", "near")


# Name -> the recipe, and what of a folder it leaves out.
PRESETS = {
    "docs": (docs, TOOLS + PAGES),
    "web": (web, TOOLS + PAGES),
    "code": (code, TOOLS),
    "books": (books, TOOLS + PAGES),
}
