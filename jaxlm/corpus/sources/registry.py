"""Maps each format to the module that reads it, which is imported when first used. Add a format here."""

import functools
import importlib
import posixpath
import re
import types
from collections.abc import Mapping

# Format -> module in this folder, suffixes of its files. Any may be compressed (see `streams.COMPRESSIONS`).
FORMATS = {
    "text": ("text", (".txt",)),
    "jsonl": ("jsonl", (".jsonl", ".ndjson")),
    "parquet": ("parquet", (".parquet",)),
    "markdown": ("text", (".md", ".markdown")),
    "markup": ("text", (".rst", ".adoc")),  # apart from text: what `PLAIN` means must not change under finished data
    "readme": ("text", ()),  # `README`; not in `AUTO`, so that finished data does not see new files in its folders
    "html": ("html", (".html", ".htm", ".xhtml")),
    "warc": ("warc", (".warc", ".warc.wet")),
    "mediawiki": ("mediawiki", (".xml",)),
    "code": ("code", ()),
}
# Names of plain text without a suffix, in lower case: README, LICENSE-MIT, changelog.Debian.
README = re.compile(
    r"(?:readme|licen[cs]e|copying|copyright|notice|news|changelog|changes|history|authors|contributors|credits|thanks|todo"
    r"|install|faq)(?:[-_]\w+)*(?:\.debian(?:\.\w+)?)?"
)
RECORDS = ("jsonl", "parquet")  # formats with fields, of which `text_key` names the text
# Suffixes of documents in formats that are not read -> how to make them readable.
DOCUMENTS = {
    (".pdf", ".ps"): "convert with pdftotext or docling",
    (".docx", ".doc", ".odt", ".pptx", ".rtf", ".epub", ".tex", ".texi", ".org"): "convert with pandoc -t markdown",
    (".mhtml",): "save as .html",
    (".ipynb",): "convert with jupyter nbconvert --to markdown",
}
# The same for files that may hold text, and for names without a suffix.
CONTAINERS = {
    (".csv", ".tsv", ".json", ".xlsx", ".xml"): 'make a .jsonl of the texts, a line {"text": "..."} each',
    (".zip", ".tar", ".tgz", ".7z", ".rar", ".gz", ".xz", ".bz2", ".zst"): "unpack first",
    ("unsuffixed",): "name those that are text NAME.txt",
}
# Prefixes `NAME:` of sources that are no paths -> the module, whose `parts` splits the source.
SCHEMES = {"embedded": "embedded", "tfds": "tfds", "hub": "hub"}
AUTO = tuple(name for name in FORMATS if name not in ("code", "readme"))
# Text that can be trained on as it is, without `jaxlm prepare`.
PLAIN = ("text", "jsonl", "parquet")
_SHOWN = 5  # suffixes, in one line


def reader(format_name: str) -> types.ModuleType:
    """Returns the module of a format or scheme, with `read` and `GRAIN` (files may be cut at its multiples; 0: never)."""
    module = FORMATS[format_name][0] if format_name in FORMATS else SCHEMES[format_name]
    return importlib.import_module(f"jaxlm.corpus.sources.{module}")


def scheme(path: str) -> str:
    """Returns `hub` for `hub:REPO`; "" for a path or a URL."""
    head = path.partition(":")[0]
    return head if head in SCHEMES else ""


def in_words(counts: Mapping[str, int]) -> str:
    """Returns the numbers of files by suffix, "312 .pdf, 4 .ps and 7 other"."""
    most = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    named = ", ".join(f"{count:,} {name}" for name, count in most[:_SHOWN])
    others = sum(count for _, count in most[_SHOWN:])
    return f"{named} and {others:,} other" if others else named


# Language: suffixes. Formats of data and of prose (json, yaml, csv, md, rst, svg) and notebooks are left out.
_SUFFIXES = """
ada: adb ads | assembly: asm s | awk: awk | c: c h | c#: cs | c++: cc cpp cxx c++ hh hpp hxx h++ ipp tpp inl
clojure: clj cljc cljs | cmake: cmake | coffeescript: coffee | common lisp: lisp lsp cl | coq: v | crystal: cr
css: css | cuda: cu cuh | cython: pyx pxd pxi | d: d di | dart: dart | elixir: ex exs | elm: elm | emacs lisp: el
erlang: erl hrl | f#: fs fsi fsx | fortran: f f03 f08 f77 f90 f95 for | gdscript: gd | glsl: frag glsl vert comp geom
go: go | graphql: gql graphql | groovy: groovy gradle | haskell: hs lhs | haxe: hx | hcl: hcl tf | java: java
javascript: js cjs mjs jsx | julia: jl | kotlin: kt kts | less: less | lean: lean | lua: lua | makefile: mk mak
matlab: matlab | metal: metal | nim: nim nims | nix: nix | objective-c: m | objective-c++: mm | ocaml: ml mli mll mly
pascal: pas pp | perl: pl pm t | php: php phtml | powershell: ps1 psm1 psd1 | prolog: prolog pro
protocol buffer: proto | purescript: purs | python: py pyi pyw | qml: qml | r: r | racket: rkt | raku: raku rakumod
ruby: rb rake gemspec | rust: rs | sass: sass | scala: scala sc sbt | scheme: scm ss sld | scss: scss
shell: sh bash zsh ksh fish | smalltalk: st | solidity: sol | sql: sql | standard ml: sml fun sig | starlark: bzl star
svelte: svelte | swift: swift | systemverilog: sv svh | tcl: tcl | tex: tex sty cls | typescript: ts tsx mts cts
vala: vala vapi | vhdl: vhd vhdl | vim script: vim | visual basic .net: vb | vue: vue | webassembly: wat wast
zig: zig
"""
# Language: names of files without such a suffix.
_NAMES = """
makefile: makefile gnumakefile | cmake: cmakelists.txt | dockerfile: dockerfile containerfile | ruby: gemfile rakefile
starlark: build.bazel workspace.bazel | groovy: jenkinsfile | meson: meson.build
"""


def _languages(table: str) -> dict[str, str]:
    entries = [entry.partition(":") for entry in table.replace("\n", "|").split("|")]
    return {word: language.strip() for language, _, words in entries for word in words.split()}


_BY_SUFFIX, _BY_NAME = _languages(_SUFFIXES), _languages(_NAMES)


def language_of(path: str) -> str:
    """Returns the language of a source file by its name; "" if unknown."""
    return _language_of_name(posixpath.basename(path).lower())


@functools.lru_cache(1 << 12)
def _language_of_name(name: str) -> str:
    return _BY_NAME.get(name) or _BY_SUFFIX.get(name.rpartition(".")[2] if "." in name else "", "")
