"""Measures how fast, and in how much memory, raw documents become shards: `python scripts/bench_data.py PART ...`.

    python scripts/bench_data.py html --input=corpora/techdocs/python      # HTML -> text -> ... -> shards
    python scripts/bench_data.py text --input=texts.jsonl.gz                # plain text -> ... -> shards
    python scripts/bench_data.py datatrove --input=texts.jsonl.gz           # the same stages by datatrove's blocks, paired
    python scripts/bench_data.py datatrove --input=corpora/techdocs/python --format=html
    python scripts/bench_data.py memory --gigabytes=3                       # a synthetic corpus, by phase
    python scripts/bench_data.py memory --files=1000000                     # a million text files of 400 bytes

Megabytes are of the input (HTML as on disk, text uncompressed). Times are of whole commands with `--workers` processes (2),
including start and reports. The peer needs `pip install -e '.[parity]'`. Paired runs leave out language identification
and tokenization, because datatrove's need files from the network. `--smallest` runs a part once, on the texts of `help()`
in place of the input.
"""

import argparse
import contextlib
import gzip
import html
import importlib.util
import json
import multiprocessing
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pydoc_data import topics

import psutil

FILTERS = ("gopher_repetition", "gopher_quality", "fineweb")
TEXT_STAGES = ("unicode", "debris", "language", *FILTERS, "pii", "junk", "exact", "near", "lines")
HTML_STAGES = ("html", "unicode", "debris", "language", "gopher_repetition", "pii", "junk", "exact", "near", "lines")
MEMORY_STAGES = ("unicode", "debris", "pii", "junk", "exact", "near", "lines")  # filters reject random words
CONFIG = """
from jaxlm.configs import base

def get_config():
    c = base.get_config()
    c.model.vocab_size = {vocab_size}
    c.prepare.workers = {workers}
    c.prepare.task_mb = {task_mb}
    c.prepare.sources.docs = base.source({path!r}, {stages!r}, format={format!r})
    return c
"""


def megabytes(path: pathlib.Path) -> float:
    """Returns the MB of a file or folder on disk; of .jsonl and .jsonl.gz, only the texts count."""
    if path.is_dir():
        return sum(megabytes(p) for p in path.rglob("*") if p.is_file())
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file:
            return sum(len(json.loads(line)["text"].encode()) for line in file) / 1e6
    return path.stat().st_size / 1e6


def timed(words: list[str]) -> float:
    """Returns the seconds that a command takes; shows its output if it fails."""
    began = time.perf_counter()
    result = subprocess.run(words, capture_output=True, text=True)
    if result.returncode:
        sys.exit(result.stdout + result.stderr)
    return time.perf_counter() - began


def command(folder: pathlib.Path, verb: str, args: argparse.Namespace, stages: tuple[str, ...]) -> list[str]:
    """Writes a config; returns the words of `jaxlm VERB`."""
    config = folder / "config.py"
    task_mb = max(1.0, min(64.0, args.mb / (8 * args.workers)))  # or less, so that all processes end together
    config.write_text(
        CONFIG.format(
            path=str(args.input),
            stages=stages,
            format=args.format,
            workers=args.workers,
            task_mb=task_mb,
            vocab_size=0 if args.smallest or args.files else 16384,
        )
    )
    flags = [f"--config={config}", f"--config.data.dir={folder / 'data'}", *args.extra]
    return [sys.executable, "-m", "jaxlm.cli.cli", verb, *flags]


def jaxlm(*args) -> float:
    """Returns the seconds that the command of `args` takes."""
    return timed(command(*args))


def end_to_end(args: argparse.Namespace, stages: tuple[str, ...]) -> None:
    """Runs `prepare`, then `tokenize`; prints MB/s of both together, and the time of each stage."""
    rates = []
    for _ in range(args.repeat):
        with tempfile.TemporaryDirectory(dir=args.scratch) as place:
            folder = pathlib.Path(place)
            prepare, tokenize = jaxlm(folder, "prepare", args, stages), jaxlm(folder, "tokenize", args, stages)
            seconds = json.loads((folder / "data" / "timings.json").read_text())["docs"]
            kept = json.loads((folder / "data" / "prepared.json").read_text())["sources"]["docs"]["kept"]
        rates.append(args.mb / (prepare + tokenize))
        kept_mb = kept["bytes"] / 1e6
        print(
            f"{args.mb:.1f} MB: prepare {prepare:.1f} s ({args.mb / prepare:.2f} MB/s), tokenize {tokenize:.1f} s "
            f"({kept_mb / tokenize:.2f} MB/s of the {kept_mb:.1f} MB kept); together {rates[-1]:.2f} MB/s"
        )
        print("  seconds in stages:", ", ".join(f"{name} {value:.1f}" for name, value in seconds.items()))
    print(f"median {statistics.median(rates):.2f} MB/s end to end on {args.workers} processes")


def datatrove_run(place: str, path: str, as_html: bool, workers: int) -> None:
    """Runs the same stages with datatrove's own blocks and their defaults."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup import MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
    from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupBuckets
    from datatrove.pipeline.extractors import Trafilatura
    from datatrove.pipeline.filters import FineWebQualityFilter, GopherQualityFilter, GopherRepetitionFilter
    from datatrove.pipeline.formatters import PIIFormatter
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers import JsonlWriter

    config = MinhashConfig(num_buckets=20, hashes_per_bucket=5)

    def execute(name: str, pipeline: list, tasks: int) -> None:
        LocalPipelineExecutor(
            pipeline, tasks=tasks, workers=min(workers, tasks), logging_dir=f"{place}/logs/{name}"
        ).run()

    extract = [Trafilatura(timeout=60.0)] if as_html else []
    filters = [GopherRepetitionFilter()] + ([] if as_html else [GopherQualityFilter(), FineWebQualityFilter()])
    execute("clean", [JsonlReader(path), *extract, *filters, PIIFormatter(), JsonlWriter(f"{place}/clean")], 8)
    execute("sign", [JsonlReader(f"{place}/clean"), MinhashDedupSignature(f"{place}/sign", config=config)], 8)
    execute("buckets", [MinhashDedupBuckets(f"{place}/sign", f"{place}/buckets", config=config)], 20)
    execute("cluster", [MinhashDedupCluster(f"{place}/buckets", f"{place}/gone", config=config)], 1)
    keep = [JsonlReader(f"{place}/clean"), MinhashDedupFilter(f"{place}/gone"), JsonlWriter(f"{place}/kept")]
    execute("filter", keep, 8)


def write_parts(folder: pathlib.Path, source: pathlib.Path, as_html: bool) -> None:
    """Writes a source's documents as eight .jsonl files, which both sides read."""
    if as_html:
        texts = (p.read_text("utf-8", "replace") for p in sorted(source.rglob("*.html")))
    else:
        texts = (json.loads(line)["text"] for line in (gzip.open if source.suffix == ".gz" else open)(source, "rt"))
    files = [(folder / f"{i}.jsonl").open("w") for i in range(8)]
    for i, text in enumerate(texts):
        files[i % 8].write(json.dumps({"text": text, "id": str(i), "format": "html" if as_html else "text"}) + "\n")
    for file in files:
        file.close()


def against_datatrove(args: argparse.Namespace) -> None:
    """Runs both sides alternately on the same files; prints each pair's ratio of times."""
    as_html = args.format == "html"
    stages = ("html", "gopher_repetition", "pii", "near") if as_html else (*FILTERS, "pii", "near")
    ratios = []
    for _ in range(args.repeat):
        with tempfile.TemporaryDirectory(dir=args.scratch) as place:
            folder = pathlib.Path(place)
            parts = folder / "parts"
            parts.mkdir()
            write_parts(parts, args.input, as_html)
            mb = megabytes(parts)
            ours = jaxlm(
                folder,
                "prepare",
                argparse.Namespace(
                    **vars(args)
                    | {"input": parts, "format": "jsonl", "mb": mb, "extra": ["--config.prepare.report_mb=0"]}
                ),
                stages,
            )
            began = time.perf_counter()
            process = multiprocessing.get_context("spawn").Process(
                target=datatrove_run, args=(str(folder / "peer"), str(parts), as_html, args.workers)
            )
            process.start()
            process.join()
            theirs = time.perf_counter() - began
            if process.exitcode:
                sys.exit("datatrove's run failed")
        ratios.append(theirs / ours)
        print(
            f"{mb:.1f} MB: jaxlm {ours:.1f} s ({mb / ours:.2f} MB/s), datatrove {theirs:.1f} s ({mb / theirs:.2f} MB/s)"
        )
    print(f"median {statistics.median(ratios):.1f} times datatrove's speed")


def synthetic(folder: pathlib.Path, gigabytes: float) -> None:
    """Writes texts of random words by Zipf's law, a tenth of them near-duplicates, in files of 100 MB."""
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlucmfwyp", k=rng.randint(2, 9))) for _ in range(50_000)]
    weights = [1 / (rank + 1) for rank in range(len(words))]
    pool = rng.choices(words, weights, k=min(2_000_000, int(1e8 * gigabytes) + 5000))
    written, part, held = 0, 0, []
    while written < gigabytes * 1e9:
        with (folder / f"{part:04d}.jsonl").open("w") as file:
            size = 0
            while size < 100e6 and written + size < gigabytes * 1e9:
                at, length = rng.randrange(len(pool) - 2000), rng.randint(50, 1500)
                if held and rng.random() < 0.1:
                    body = [*held[rng.randrange(len(held))], "again"]
                else:
                    body = pool[at : at + length // 2] + rng.sample(pool, length // 2)
                    held = [*held[-200:], body]
                lines = [" ".join(body[i : i + 12]).capitalize() + "." for i in range(0, len(body), 12)]
                size += file.write(json.dumps({"text": "\n".join(lines)}) + "\n")
        written, part = written + size, part + 1


def small_input(folder: pathlib.Path, as_html: bool) -> pathlib.Path:
    """Writes the sentences of `help()`'s topics as HTML files, or as one file; returns the folder or the file."""
    paragraphs = {name: [" ".join(part.split()) for part in text.split("\n\n")] for name, text in topics.topics.items()}
    texts = {name: "\n\n".join(p for p in parts if p.endswith(".")) for name, parts in paragraphs.items()}
    if not as_html:
        path = folder / "texts.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts.values()))
        return path
    for name, text in texts.items():
        body = "".join(f"<p>{html.escape(paragraph)}</p>" for paragraph in text.split("\n\n"))
        page = f"<html><head><title>{name}</title></head><body><article><h1>{name}</h1>{body}</article></body></html>"
        (folder / f"{name}.html").write_text(page)
    return folder


def small_files(folder: pathlib.Path, number: int) -> None:
    """Writes texts of a few sentences of `help()`, 1,000 to a folder; a tenth are the text before with a word more."""
    rng, text = random.Random(0), ""
    sentences = sorted({" ".join(s.split()) + "." for topic in topics.topics.values() for s in topic.split(". ")})
    sentences = [s for s in sentences if 40 < len(s) < 200 and s.isascii()]
    for i in range(number):
        place = folder / f"{i // 1000:04d}"
        place.mkdir(exist_ok=True)
        text = f"{text} Again." if text and rng.random() < 0.1 else " ".join(rng.sample(sentences, 4))
        (place / f"{i:07d}.txt").write_text(text + "\n")


def memory(args: argparse.Namespace) -> None:
    """Prints the seconds and the peak memory of each phase: PSS, which counts shared pages once."""
    with tempfile.TemporaryDirectory(dir=args.scratch) as place:
        folder = pathlib.Path(place)
        args.input = folder / "raw"
        args.input.mkdir()
        if args.files:
            small_files(args.input, args.files)
        else:
            synthetic(args.input, args.gigabytes)
        args.mb, args.format = megabytes(args.input), "auto"
        for verb in ("prepare", "tokenize"):
            watched(command(folder, verb, args, HTML_STAGES if args.files else MEMORY_STAGES))
        print(f"{args.mb / 1e3:.2f} GB; disk {_gb(folder):.1f} GB")


def watched(words: list[str]) -> None:
    """Runs a command; after each line that it writes, prints the seconds and the peaks since the line before."""
    peaks, stop = {}, threading.Event()
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        threading.Thread(target=_watch, args=(process.pid, peaks, stop), daemon=True).start()
        began = time.perf_counter()
        for line in process.stdout:
            now = time.perf_counter()
            gigabytes = ", ".join(f"{who} {peaks.pop(who):.2f} GB" for who in list(peaks))
            print(f"{now - began:7.1f} s  {gigabytes:60}  {line.rstrip()}", flush=True)
            began = now
    stop.set()
    if process.returncode:
        sys.exit(process.returncode)


def _watch(pid: int, peaks: dict[str, float], stop: threading.Event) -> None:
    """Notes the peaks of the driver, of its largest worker, and of all together."""
    while not stop.wait(0.5):
        with contextlib.suppress(psutil.Error):
            driver = psutil.Process(pid)
            sizes = [process.memory_full_info().pss / 1e9 for process in [driver, *driver.children(recursive=True)]]
            now = {"driver": sizes[0], "worker": max(sizes[1:], default=0.0), "all": sum(sizes)}
            peaks |= {who: max(gigabytes, peaks.get(who, 0.0)) for who, gigabytes in now.items()}


def _gb(folder: pathlib.Path) -> float:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("html", "text", "datatrove", "memory"))
    parser.add_argument("--input", type=pathlib.Path)
    parser.add_argument("--format", default="auto", help="auto | html")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--gigabytes", type=float, default=3.0)
    parser.add_argument("--files", type=int, default=0, help="memory: so many small files in place of --gigabytes")
    parser.add_argument("--scratch", type=pathlib.Path, help="folder for temporary files")
    parser.add_argument("--smallest", action="store_true", help="few texts, once: to see that it works")
    args = parser.parse_args()
    args.extra = []
    if args.part == "datatrove" and not all(map(importlib.util.find_spec, ("spacy", "trafilatura"))):
        parser.error("the peer is not installed: pip install -e '.[parity]'")
    with tempfile.TemporaryDirectory() as place:
        if args.smallest:
            args.repeat, args.gigabytes, args.workers = 1, 0.0003, 1
            args.extra = ["--config.prepare.report_mb=0"]
            args.input = small_input(pathlib.Path(place), "html" in (args.part, args.format))
        measure(args, parser)


def measure(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if args.part == "memory":
        memory(args)
        return
    if args.input is None or not args.input.exists():
        parser.error("--input=FILE_OR_FOLDER that exists is needed")
    args.input = args.input.resolve()
    args.mb = megabytes(args.input)
    if args.part == "datatrove":
        against_datatrove(args)
    else:
        end_to_end(args, HTML_STAGES if args.part == "html" else TEXT_STAGES)


if __name__ == "__main__":
    main()
