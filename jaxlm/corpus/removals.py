"""Names the stages that removed much of a source, with examples, and the settings that would keep the removed text."""

import collections
import json
import math
import pathlib
import re
import shlex
import statistics
import textwrap
import typing
from collections.abc import Mapping, Sequence

from jaxlm.corpus import prepare
from jaxlm.corpus.audit import audit
from jaxlm.corpus.sources import base

_CUT = 0.01  # parts for each document, from which on cuts of the stage `junk` are told
MUCH = 0.1  # of a source's documents, or of a stage's text
_OTHER_BYTES = (base.READ_AS[:9], base.NOT_UTF8, base.BAD_BYTES)  # what became of a text that is not UTF-8
_MAIN = 0.2  # of a stage's removals: settings are shown for reasons of at least this share
_EXAMPLES = 3
_REASONS = 3
_MANY_ODD = 10  # documents
_FEW_BYTES = 10_000  # of text: less is not reported, whatever its share
_DETAIL_CHARS = 60
_LINES = ("dup_line_frac", "dup_para_frac", "dup_line_char_frac", "dup_para_char_frac")
# Stage -> reason -> settings that turn off its limit, and the limits that would remove the same documents next.
_OFF = {
    "html": {"no main text": "min_chars=0"},
    "unicode": {"undecodable": "max_undecodable=1"},
    "language": {"uncertain language": "keep_doubtful=True"},
    "gopher_quality": {
        "gopher_short_doc": "min_words=0",
        "gopher_long_doc": "max_words=0",
        "gopher_below_avg_threshold": "min_mean_word_length=0",
        "gopher_above_avg_threshold": "max_mean_word_length=0",
        "gopher_too_many_hashes": "max_symbols_per_word=0",
        "gopher_too_many_ellipsis": "max_symbols_per_word=0",
        "gopher_too_many_bullets": "max_bullet_lines=0",
        "gopher_too_many_end_ellipsis": "max_ellipsis_lines=0",
        "gopher_below_alpha_threshold": "min_alphabetic_words=0",
        "gopher_enough_stop_words": "min_stop_words=0",
    },
    "gopher_repetition": {name: f"{name}=0" for name in _LINES}
    | {f"top_{n}_gram": " ".join(f"top_{m}_gram=0" for m in range(n, 5)) for n in (2, 3, 4)}
    | {f"duplicated_{n}_n_grams": " ".join(f"dup_{m}_gram=0" for m in range(n, 11)) for n in range(5, 11)},
    "c4": {
        "too_few_sentences": "min_sentences=0",
        "lorem_ipsum": "lorem_ipsum=False",
        "curly_bracket": "curly_bracket=False",
        "nothing left": "min_words_per_line=0",
    },
    "fineweb": {
        "line_punct_ratio": "min_punctuated_lines=0",
        "short_line_ratio": "max_short_lines=1",
        "char_dup_ratio": "max_repeated_line_chars=1",
        "list_ratio": "max_newlines_per_word=1000",
    },
    "code": {
        "generated": "generated=False",
        "data": "max_data=1",
        "minified": "max_line_chars=0 max_mean_line_chars=0",
        "few letters": "min_alphabetic=0",
        "not ASCII": "max_non_ascii=1",
        "does not parse": "parses=False",
    },
    "near": {"near duplicate": "threshold=1"},
}
_LANGUAGE = re.compile(r"\w+")


class Taken(typing.NamedTuple):
    """A stage that removed much of a source."""

    lines: list[str]  # for users
    keep: tuple[str, ...]  # flags that would keep most of the documents


def much(manifest: Mapping, root: pathlib.Path, stages: Mapping[str, Sequence[str]]) -> list[Taken]:
    """Returns the stages that removed over `MUCH` of a source's documents or text. `stages`: source -> its lines of stages."""
    shown = collections.defaultdict(list)
    for example in prepare.examples(root):
        shown[example["source"], example["stage"], example["reason"]].append(example)
    taken = []
    for name, source in manifest["sources"].items():
        documents = source["read"]["documents"]
        for stage in source["stages"]:
            removed = collections.Counter(stage["removed"])
            gone = stage["bytes_in"] - stage["bytes_out"] if stage["name"] != "html" else 0
            text = gone / stage["bytes_in"] if gone > _FEW_BYTES else 0.0
            if removed.total() <= MUCH * documents and text <= MUCH:
                continue
            cut, line = f"{text:.0%} of the text that came to it" if text >= MUCH else "", f"{stage['name']} took "
            reason, count = (removed.most_common(1) or [("", 0)])[0]
            if reason:
                share = f"{removed.total() / max(documents, 1):.0%}"
                line += f"{removed.total():,} of {documents:,} documents of {name} ({share})"
                line += f", {cut}" * bool(cut) + f"; {count:,} by {reason!r}"
            else:
                line += f"{cut} of {name}"
            if examples := shown[name, stage["name"], reason][:_EXAMPLES]:
                line += f", such as {', '.join(_named(example, i == 0) for i, example in enumerate(examples))}"
            keep = _keep(name, stage["name"], removed, shown, manifest, stages[name])
            taken.append(Taken([line, *([f"  to keep them: {' '.join(keep)}"] if keep else [])], keep))
    return taken


def losses(manifest: Mapping, findings: Mapping, patterns: Sequence[str]) -> list[str]:
    """Returns a line for each loss that no stage alone shows: records not read, all stages together, junk, mismatch.

    patterns: those of the stage `junk`, to which a flag that removes more adds.
    """
    lines = []
    for name, source in manifest["sources"].items():
        read, kept = source["read"], source["kept"]
        if read["documents"] == sum(read["failed"].values()):
            lines.append(f"source {name} gave no document: it is left out of the mixture")
        if failed := collections.Counter(read["failed"]):
            why = _counts(failed)
            lines.append(f"{failed.total():,} of {read['documents']:,} records of {name} were not used: {why}")
        removed = sum(sum(stage["removed"].values()) for stage in source["stages"])
        judges = [stage for stage in source["stages"] if stage["name"] not in ("html", "pii") and stage["bytes_in"]]
        text = 1 - math.prod(stage["bytes_out"] / stage["bytes_in"] for stage in judges)
        if max(removed / max(1, read["documents"]), text) >= MUCH and kept["documents"] + removed:
            share = removed / max(1, read["documents"])
            lines.append(f"all stages together took {share:.0%} of the documents of {name} and {text:.0%} of its text")
        if other := {reason: n for reason, n in read["repaired"].items() if reason.startswith(_OTHER_BYTES)}:
            lines.append(f"{sum(other.values()):,} documents of {name} had bytes of another charset: {_counts(other)}")
        cut = collections.Counter(next((stage["edits"] for stage in source["stages"] if stage["name"] == "junk"), {}))
        if cut.total() >= max(1, _CUT * read["documents"]):
            lines.append(
                f"junk cut {cut.total():,} parts out of documents of {name}: {_counts(cut)} (removed/junk.jsonl.gz)"
            )
        if lost := collections.Counter(read.get("lost", {})):
            lines.append(f"templates of {name} left out with their words: {_counts(lost)}")
    for name in manifest["sources"]:
        lines += _junk([row for row in findings.get("junk") or () if row["source"] == name], patterns)
    for name, advice in ((findings.get("mismatch") or {}).get("advice") or {}).items():
        if advice["action"] in ("lower", "drop"):
            lines.append(f"mismatch: {name}: {advice['sentence']}")
    return lines


def judged(drawn: Mapping) -> list[str]:
    """Returns a line on how many near duplicates say something else than what stays."""
    if not drawn["drawn"]:
        return []
    says = f"say something that what stays does not ({share_of_false(drawn)}): see report.html"
    many = f"{drawn['of']:,} document{'s' * (drawn['of'] != 1)}"
    return [f"near removed {many}; of {drawn['drawn']} drawn {drawn['false']} {says}"]


def share_of_false(drawn: Mapping) -> str:
    """Returns a share in percent with its 95% interval (Wilson 1927)."""
    n, false = drawn["drawn"], drawn["false"]
    z = statistics.NormalDist().inv_cdf(0.975)  # by hand, since scipy.stats takes a second to import
    middle, half = (false + z * z / 2) / (n + z * z), z / (n + z * z) * math.sqrt(false * (n - false) / n + z * z / 4)
    low, high = max(0.0, middle - half), min(1.0, middle + half)
    return f"{false / n:.0%}, 95% interval {low:.0%} to {high:.0%}"


def shared(pairs: Sequence[Mapping]) -> list[str]:
    """Returns a line for each source of which much stands in another."""
    return [
        f"{pair['share']:.0%} of {pair['source']}'s runs of 50 words stand in {pair['stands_in']} too; to drop "
        f"{pair['source']} from the mixture: --config.prepare.sources.{pair['source']}.weight=0"
        for pair in pairs
    ]


def _junk(rows: Sequence[Mapping], patterns: Sequence[str]) -> list[str]:
    """Returns the lines on one source's junk that is left, with the flag that would remove it, and on odd documents."""
    # The stage `lines` removes repeated lines; those that it leaves, such as imports of code, are text.
    lines, junk = [], [row for row in rows if row["junk"] and row["kind"] not in ("line", "clause")]
    if junk:
        named = [f"{_short(row['text'])!r} in {row['share_of_documents']:.1%}" for row in junk[:_EXAMPLES]]
        wanted = dict.fromkeys([*patterns, *(row["pattern"] for row in junk[:_EXAMPLES])])
        flag = shlex.quote(f"({', '.join(map(json.dumps, wanted))},)")
        lines.append(
            f"junk is left in {junk[0]['source']}: {', '.join(named)} of the documents; to remove it: "
            f"--config.prepare.stages.junk.patterns={flag}"
        )
    for row in rows:
        if row["kind"] == audit.DOCUMENTS and row["count"] >= _MANY_ODD:
            shown = ", ".join(example["document"] for example in row["examples"][:_EXAMPLES])
            lines.append(
                f"{row['count']:,} documents of {row['source']} are unlike the rest ({row['text']}), such as {shown}"
            )
    return lines


def _counts(counts: Mapping[str, int]) -> str:
    most = collections.Counter(counts).most_common(_REASONS)
    rest = sum(counts.values()) - sum(count for _, count in most)
    return ", ".join(f"{count:,} {reason}" for reason, count in most) + (f", {rest:,} others" if rest else "")


def _named(example: Mapping[str, str], whole: bool) -> str:
    if not (whole and example["reason"] and example["detail"]):
        return example["id"]
    return f"{example['id']} ({_short(example['detail'])})"


def _short(text: str) -> str:
    return textwrap.shorten(text, _DETAIL_CHARS, placeholder=" ...")


def _keep(
    source: str,
    stage: str,
    removed: collections.Counter[str],
    shown: Mapping[tuple[str, str, str], list[dict]],
    manifest: Mapping,
    stages: Sequence[str],
) -> tuple[str, ...]:
    """Returns flags to keep such text: more languages, limits off, or else the stage off; () if none keeps it."""
    if stage in ("exact", "without"):
        return ()  # one copy of each document stays; no setting of a stage keeps what a list takes out
    main = [reason for reason, count in removed.most_common() if count >= _MAIN * removed.total()]
    if stage == "language" and main[:1] == ["other language"]:
        lines = manifest["recipe"][f"stages of {source}"]
        settings = next((line[1] for line in lines if isinstance(line, list) and line[0] == stage), {})
        codes = [match[0] for example in shown[source, stage, main[0]] if (match := _LANGUAGE.match(example["detail"]))]
        most = [code for code, _ in collections.Counter(codes).most_common()]
        wanted = dict.fromkeys([*settings.get("languages", ()), *most])
        return (f'--config.prepare.stages.language.languages="{tuple(wanted)}"',)
    known = _OFF.get(stage, {})
    # The source's own limits win over those of prepare.stages.
    own = any(line.startswith(f"{stage} ") for line in stages)
    if main and not own and all(reason in known for reason in main):
        keys = dict.fromkeys(key for reason in main for key in known[reason].split())
        return tuple(f"--config.prepare.stages.{stage}.{key}" for key in keys)
    left = [line for line in stages if line.split()[0] != stage]
    return (f'--config.prepare.sources.{source}.stages="{tuple(left)}"',)
