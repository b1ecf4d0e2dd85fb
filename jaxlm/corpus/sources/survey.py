"""Lists the kinds of documents in a folder, the files that can't be read, and how to convert these."""

import collections
import contextlib
import dataclasses
from collections.abc import Mapping

from jaxlm.config import ConfigError
from jaxlm.corpus.sources import code, files, registry, streams

_SNIFF_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class Survey:
    """The files of a folder by format, and those in no supported format by suffix."""

    files: dict[str, int]  # format -> number of files, most bytes first
    sizes: dict[str, int]
    unread: dict[str, int]  # suffix -> number of files in no supported format


def survey(path: str, exclude: tuple[str, ...]) -> Survey:
    """Returns the files of a path, folder or glob by format. Looks into XML files, of which only wikis are supported."""
    formats = tuple(name for name in registry.FORMATS if name != "code")
    fs, root = files.filesystem(path)
    if fs.isfile(root):
        name, size = files.format_of(root, formats) or ("code" if registry.language_of(root) else ""), fs.size(root)
        return Survey({name: 1}, {name: size}, {}) if name else Survey({}, {}, {files.suffix(root): 1})
    by_format: dict[str, list[files.Found]] = collections.defaultdict(list)
    unread, no_code = collections.Counter(), collections.Counter()
    with contextlib.suppress(ConfigError):
        for file in files.find(path, *formats, others=unread, exclude=exclude):
            by_format[files.format_of(file.name, formats)].append(file)
    if fs.isdir(root):
        with contextlib.suppress(ConfigError):
            by_format["code"] = code.find(path, exclude, no_code)
        unread &= no_code
    if not any(b"<mediawiki" in _head(file) for file in by_format["mediawiki"]):
        unread[".xml"] += len(by_format.pop("mediawiki"))
    sizes = {name: sum(file.size or 0 for file in listed) for name, listed in by_format.items() if listed}
    order = sorted(sizes, key=lambda name: -sizes[name])
    return Survey({name: len(by_format[name]) for name in order}, {name: sizes[name] for name in order}, dict(+unread))


def _head(file: files.Found) -> bytes:
    return b"<mediawiki" if streams.compression(file.name) else streams.read_bytes(file.url, _SNIFF_BYTES)


def unread_lines(path: str, unread: Mapping[str, int]) -> list[str]:
    """Returns lines on the files below `path` that are not read: one for each way to convert them, one for the rest."""
    lines, rest = [], dict(unread)
    for suffixes, how in (registry.DOCUMENTS | registry.CONTAINERS).items():
        if these := {name: rest.pop(name) for name in suffixes if name in rest}:
            lines.append(f"{path}: {_counted(these)} not read: {how}")
    if rest:
        lines.append(f"{path}: {_counted(rest)} in no supported format")
    return lines


def _counted(counts: Mapping[str, int]) -> str:
    """Returns words such as "312 .pdf, 4 .ps files are"."""
    return f"{registry.in_words(counts)} {'file is' if sum(counts.values()) == 1 else 'files are'}"
