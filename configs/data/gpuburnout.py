"""The first story's mix (docs/stories.md) from the hub: FineWeb-Edu 87, FineMath 10, Python-Edu 3; 30B tokens.

    jaxlm prepare configs/data/gpuburnout.py
    jaxlm tokenize configs/data/gpuburnout.py

The sources are streamed, and no more of each is read than its budget of tokens needs. The same command goes on after a
stop. To read copies of your own, or small ones to try: `--config.data.hub_dir=DIR`, which holds DIR/REPOSITORY/**.parquet.

- HuggingFaceFW/fineweb-edu, configuration sample-100BT: a random sample of all crawls (text, url, score, ...).
- HuggingFaceTB/finemath, configuration finemath-4plus: 6.7M pages, 9.6B tokens (text, url, score, ...).
- Python-Edu as HuggingFaceTB/smollm-corpus has it holds the ids of its files at Software Heritage, not their text.
  Avelina/python-edu-cleaned is a copy of it with the text (`text`), 7.7M files, made by others: look at it first. If
  you have access to Software Heritage's bucket, make your own copy and give its folder as the source's path.

For 30B tokens it reads 149 GB of text, if the bytes a token and the share kept assumed below are right; about half as much
comes over the network (parquet is compressed). Hours = 149,000 MB / (MB/s of a core x cores) / 3600, dollars = hours x
price of the machine: 64 cores of 0.75 MB/s need 0.9 hours, $3 at $3 an hour. All of this is computed, not yet measured.
"""

from jaxlm.configs import base

TOKENS = 30e9
# Assumed: of a 32k BPE trained on this mix; the share of the text that the stages leave.
BYTES_PER_TOKEN = {"fineweb_edu": 4.6, "finemath": 3.6, "python_edu": 3.4}
KEPT = 0.9


def budget(name: str, percent: float) -> int:
    """Bytes of text to read of a source."""
    return int(TOKENS * percent / 100 * BYTES_PER_TOKEN[name] / KEPT)


def get_config():
    c = base.get_config()
    c.data.dir = "data/1b"
    c.data.chat_tokens = True
    c.model.vocab_size = 32005
    web = ("unicode", "debris", "language", "gopher_quality", "gopher_repetition", "pii", "junk", "exact", "near")
    c.prepare.sources.fineweb_edu = base.source(
        "hub:HuggingFaceFW/fineweb-edu:sample-100BT", web, weight=87.0, max_bytes=budget("fineweb_edu", 87)
    )
    # Formulas are neither words nor sentences: the rules of Gopher would take them.
    c.prepare.sources.finemath = base.source(
        "hub:HuggingFaceTB/finemath:finemath-4plus",
        ("unicode", "debris", "pii", "junk", "exact", "near"),
        priority=1,
        weight=10.0,
        max_bytes=budget("finemath", 10),
    )
    c.prepare.sources.python_edu = base.source(
        "hub:Avelina/python-edu-cleaned",
        ("unicode", "code", "pii", "junk", "exact", "near"),
        priority=1,
        weight=3.0,
        max_bytes=budget("python_edu", 3),
    )
    return c
