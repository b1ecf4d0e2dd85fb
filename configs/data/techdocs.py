"""Technical documentation: raw HTML of 22 Debian packages, with everything that a real corpus suffers from.

    python scripts/make_techdocs_corpus.py --out=corpora/techdocs
    jaxlm prepare configs/data/techdocs.py
    jaxlm tokenize configs/data/techdocs.py
    jaxlm train techdocs_35m --config.workdir=runs/techdocs

It has navigation around every page, pages in twenty languages, and older versions that nearly duplicate the newest. Of those
the newest stays (`priority`). The result is in data/techdocs; report.html there says what was removed and why.

753 MB of HTML in 21,791 files (Debian 12, 2026-11). Without the handbook's translations 18,616 pages, 693 MB, of which
6,967 documents and 77 MB of text are kept. `prepare` took 4 minutes on 2 slow cores. To remove benchmark items, add
"decontaminate" with the benchmarks' files (`paths=`) before "exact".
"""

from jaxlm.configs import base

# Reference pages repeat themselves by nature; the limits for prose took every tenth, library/inspect.html among them.
REPETITION = (
    "gopher_repetition dup_line_frac=0.7 dup_para_frac=0.7 dup_line_char_frac=0.5 dup_para_char_frac=0.5 "
    "top_2_gram=0.3 top_3_gram=0.3 top_4_gram=0.3 "
    "dup_5_gram=0.5 dup_6_gram=0.5 dup_7_gram=0.5 dup_8_gram=0.5 dup_9_gram=0.5 dup_10_gram=0.5"
)
STAGES = (
    "html",
    "unicode",
    "debris",
    "language",
    REPETITION,
    "pii",
    "junk",
    "exact",
    "near",
    "lines",
)
# Source -> weight in the mixture, near to what is left of each; `older` holds the older versions of all.
SOURCES = {
    "python": 20.0,
    "postgresql": 10.0,
    "linux": 35.0,
    "handbook": 3.0,  # English alone: half-translated pages keep paragraphs of the original, and win over it by length
    "debian": 3.0,
    "clang": 3.0,
    "apache": 3.0,
    "git": 4.0,
    "sqlite": 7.0,
    "django": 7.0,
    "older": 5.0,
}


def get_config():
    c = base.get_config()
    c.data.dir = "data/techdocs"
    c.model.vocab_size = 20480
    for name, weight in SOURCES.items():
        priority = 0 if name == "older" else 1
        path = f"corpora/techdocs/{name}" + ("/*/*/html/en-US/*.html" if name == "handbook" else "")
        source = base.source(path, STAGES, priority=priority, weight=weight, format="html")
        c.prepare.sources[name] = source
    return c
