"""Finds the licence of source code, as an SPDX id.

In SPDX headers (spdx.dev, annex E) and by the words of licence files.
"""

import re

FILE_NAME = re.compile(r"(licen[cs]e|copying|unlicense)([.-].*)?", re.IGNORECASE)
HEADER_CHARS = 4096
_HEADER = re.compile(r"SPDX-License-Identifier:[ \t]*((?:\(?[\w.+-]+\)?(?:[ \t]+(?:AND|OR|WITH)[ \t]+)?)+)")
# The one that begins first counts, and of several that begin there the first of these. `...` is anything.
_MIT = "permission is hereby granted, free of charge, to any person obtaining a copy"
_ISC = "permission to use, copy, modify, ... distribute this software for any purpose with or without fee is hereby granted"
_BSD = "redistribution and use in source and binary forms"
_WORDS = (
    ("Apache-2.0", "apache license version 2.0"),
    ("AGPL-3.0", "gnu affero general public license version 3"),
    ("LGPL-3.0", "gnu lesser general public license version 3"),
    ("LGPL-2.1", "gnu lesser general public license version 2.1"),
    ("LGPL-2.0", "gnu library general public license version 2"),
    ("GPL-3.0", "gnu general public license version 3"),
    ("GPL-2.0", "gnu general public license version 2"),
    ("MPL-2.0", "mozilla public license version 2.0"),
    ("MPL-2.0", "mozilla public license, v. 2.0"),
    ("EPL-2.0", "eclipse public license - v 2.0"),
    ("EPL-1.0", "eclipse public license - v 1.0"),
    ("CC0-1.0", "cc0 1.0 universal"),
    ("Unlicense", "this is free and unencumbered software released into the public domain"),
    ("BSL-1.0", "boost software license - version 1.0"),
    ("PSF-2.0", "python software foundation license version 2"),
    ("Artistic-2.0", "the artistic license 2.0"),
    ("ISC", f"{_ISC}, provided that"),
    ("0BSD", f"{_ISC}. the software is provided"),
    ("Zlib", "this software is provided 'as-is', without any express or implied warranty"),
    ("BSD-4-Clause", f"{_BSD} ... all advertising materials mentioning features"),
    ("BSD-3-Clause", f"{_BSD} ... endorse or promote products"),
    ("BSD-2-Clause", _BSD),
    ("MIT-0", f"{_MIT} ... to do so. the software is provided"),
    ("MIT", _MIT),
)
_PHRASES = [(spdx, re.compile(".*?".join(map(re.escape, words.split(" ... "))), re.DOTALL)) for spdx, words in _WORDS]


def of_header(text: str) -> str:
    """Returns the SPDX expression in a file's first lines; "" if there is none."""
    match = _HEADER.search(text, 0, HEADER_CHARS)
    return match[1].strip() if match else ""


def of_licence_file(text: str) -> str:
    """Returns the SPDX id of a licence text; "" if the text is no licence that is known here."""
    words = re.sub(r"[\s*#/>\"\u201c\u201d]+", " ", text.lower()).replace("license, version", "license version")
    words = re.sub("[\u2018\u2019]", "'", words)
    found = [(match.start(), i, spdx) for i, (spdx, phrase) in enumerate(_PHRASES) if (match := phrase.search(words))]
    return min(found, default=(0, 0, ""))[2]


def allowed(expression: str, wanted: tuple[str, ...]) -> bool:
    """True if the licences in `wanted` satisfy an SPDX expression: all licences of an AND, at least one side of an OR.

    An expression that mixes AND and OR in parentheses passes only if every licence in it is wanted. Case, `-only` and
    exceptions (WITH) are ignored.
    """

    def plain(spdx: str) -> str:
        return spdx.strip(" ()").split(" ")[0].lower().removesuffix("-only")

    names = {plain(spdx) for spdx in wanted}
    if "(" in expression and " AND " in expression and " OR " in expression:  # no parser for a handful of files
        expression = expression.replace(" OR ", " AND ")
    sides = [[plain(spdx) for spdx in side.split(" AND ")] for side in expression.split(" OR ")]
    return any(all(spdx in names for spdx in side) for side in sides)
