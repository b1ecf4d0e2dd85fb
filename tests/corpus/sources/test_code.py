"""Trees of code: what is ignored, vendored or binary stays out; licences by header and by the nearest file."""

import pytest

from jaxlm.corpus.sources import code

MIT = "MIT License\n\nPermission is hereby granted, free of charge, to any person obtaining\na copy of this software"
GPL = "GNU GENERAL PUBLIC LICENSE\n   Version 3, 29 June 2007\n ... GNU Affero General Public License, version 3"
BSD = "Redistribution and use in source and binary forms, with or without\n# modification{}"


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "tree"
    for name, text in {
        "repo/LICENSE": MIT,
        "repo/.gitignore": "*.gen.py\n/local/\nlogs/\n!logs/keep.py\n",
        "repo/main.py": "print(1)\n",
        "repo/a.gen.py": "generated",
        "repo/local/x.py": "ignored",
        "repo/src/local/x.py": "not ignored: the pattern is anchored",
        "repo/src/.gitignore": "!b.gen.py\n*.c\n",
        "repo/src/b.gen.py": "taken back by the inner file",
        "repo/src/x.c": "ignored by the inner file",
        "repo/src/x.h": "// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause\nint x;",
        "repo/x.c": "/* SPDX-License-Identifier: GPL-2.0-only */\n",
        "repo/gpl/COPYING": GPL,
        "repo/gpl/deep/y.rs": "fn main() {}",
        "repo/node_modules/m/index.js": "vendored",
        "repo/.git/hooks/x.py": "git",
        "repo/build/x.py": "built",
        "repo/README.md": "prose",
        "repo/data.json": "{}",
        "repo/Makefile": "all:\n",
        "other/Dockerfile": "FROM x\n",
        "other/z.go": "package z",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "repo" / "binary.py").write_bytes(b"\x7fELF\0\0\0")
    return root


def test_a_tree(tree, read_source):
    documents, stats = read_source(tree, format="code")
    found = {d.id: (d.metadata["language"], d.metadata.get("licence")) for d in documents}
    assert found == {
        "other/Dockerfile": ("dockerfile", None), "other/z.go": ("go", None), "repo/Makefile": ("makefile", "MIT"),
        "repo/gpl/deep/y.rs": ("rust", "GPL-3.0"), "repo/main.py": ("python", "MIT"),
        "repo/src/b.gen.py": ("python", "MIT"), "repo/src/local/x.py": ("python", "MIT"),
        "repo/src/x.h": ("c", "Apache-2.0 OR BSD-3-Clause"), "repo/x.c": ("c", "GPL-2.0-only"),
    }  # fmt: skip
    assert list(found) == sorted(found)
    assert stats.skipped == {"binary file": 1}
    assert {d.metadata["site"] for d in documents} == {"repo", "other"}
    assert {d.metadata["format"] for d in documents} == {"code"}


def test_the_licence_filter_counts_what_it_drops(tree, read_source):
    documents, stats = read_source(tree, format="code", licences=("MIT", "bsd-3-clause"))
    assert [d.id for d in documents] == [
        "repo/Makefile", "repo/main.py", "repo/src/b.gen.py", "repo/src/local/x.py", "repo/src/x.h",
    ]  # fmt: skip
    assert stats.skipped == {"licence not found": 2, "licence GPL-3.0": 1, "licence GPL-2.0-only": 1, "binary file": 1}
    assert read_source(tree, format="code", licences=("GPL-2.0",))[0][0].id == "repo/x.c"


@pytest.mark.parametrize(
    ("text", "spdx"),
    [
        (MIT, "MIT"),
        (GPL, "GPL-3.0"),
        ("                    GNU LESSER GENERAL PUBLIC LICENSE\n Version 2.1, February 1999", "LGPL-2.1"),
        ("                                 Apache License\n                           Version 2.0, January 2004", "Apache-2.0"),
        (BSD.format(""), "BSD-2-Clause"),
        (BSD.format("; may not be used to endorse or promote products"), "BSD-3-Clause"),
        ("Permission to use, copy, modify, and/or distribute this software for any\npurpose with or without fee is"
         " hereby granted, provided that the above", "ISC"),
        ("All rights reserved. Nobody may copy this.", ""),
    ],
)  # fmt: skip
def test_licence_texts(text, spdx):
    assert code.licence_of_text(text) == spdx


@pytest.mark.parametrize(
    ("expression", "wanted", "allowed"),
    [
        ("MIT", ("mit",), True),
        ("", ("MIT",), False),
        ("GPL-2.0-only", ("GPL-2.0",), True),
        ("GPL-2.0-or-later", ("GPL-2.0",), False),
        ("(GPL-2.0 OR BSD-3-Clause)", ("BSD-3-Clause",), True),
        ("MIT AND GPL-3.0", ("MIT",), False),
        ("(MIT OR GPL-3.0) AND GPL-2.0", ("MIT",), False),
        ("GPL-2.0 WITH Linux-syscall-note", ("GPL-2.0",), True),
    ],
)
def test_expressions(expression, wanted, allowed):
    assert code.allowed(expression, wanted) is allowed
    assert code.licence_of_header(f"#!/bin/sh\n# SPDX-License-Identifier: {expression}\nx") == expression
