"""Tells a source file's programming language by its name. Languages are named as in GitHub Linguist, in lower case."""

import functools
import posixpath

# Language: suffixes. Formats of data and of prose (json, yaml, csv, md, rst, svg) are none; notebooks neither.
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
_NAMES = {
    "makefile": "makefile",
    "gnumakefile": "makefile",
    "cmakelists.txt": "cmake",
    "dockerfile": "dockerfile",
    "containerfile": "dockerfile",
    "gemfile": "ruby",
    "rakefile": "ruby",
    "build.bazel": "starlark",
    "workspace.bazel": "starlark",
    "jenkinsfile": "groovy",
    "meson.build": "meson",
}
_BY_SUFFIX = {
    suffix: entry.partition(":")[0].strip()
    for entry in _SUFFIXES.replace("\n", "|").split("|")
    for suffix in entry.partition(":")[2].split()
}


def of_file(path: str) -> str:
    """Returns the language of a source file; "" if its name tells none."""
    return _of_name(posixpath.basename(path).lower())


@functools.lru_cache(1 << 12)
def _of_name(name: str) -> str:
    return _NAMES.get(name) or _BY_SUFFIX.get(name.rpartition(".")[2] if "." in name else "", "")
