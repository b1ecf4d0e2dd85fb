"""Files from elsewhere, mangled: each verb ends with an exit code and a line, never with a traceback.

A sample is drawn from the quick verbs. The whole: `pytest -n0 -m faults tests/test_foreign_files.py --trials=500 --draw=SEED`.
"""

import dataclasses
import gzip
import json
import pathlib
import random
import shutil
import traceback

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tiny_chats
import tiny_data
import tiny_hf
import tiny_items
import tiny_mangled
import tiny_peft
from backports import zstd
from safetensors.numpy import save_file

from jaxlm import config
from jaxlm.cli import cli
from jaxlm.config import config_files
from jaxlm.devices import tree
from jaxlm.eval import results
from jaxlm.interop import hf_config, peft, peft_config
from jaxlm.run.survive import supervisor

pytest.importorskip("tokenizers")
pytestmark = pytest.mark.faults
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
SHORT = ("--config.plan.measure=never", "--config.model.attention=xla")
TRAINS = (
    "--config.train.steps=2", "--config.train.batch_size=8", "--config.train.seq_len=32", "--config.eval.max_batches=1",
    "--config.runs.supervise=off", "--config.log.tensorboard=False", "--config.optim.warmup_steps=0",
    "--config.sample.prompts=()", "--config.data.val_fraction=0.2", "--config.workdir={out}",
)  # fmt: skip
MODEL = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
EXPORT = ("jaxlm_export.json", "model.safetensors", "config.json", "tokenizer.json")
MODEL += ("special_tokens_map.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors")
DATA = ("manifest.json", "tokenizer.model", "token_bytes.npy")
RUN = ("config.json", "run.json", "metrics.jsonl", "tokenizer/tokenizer.json", "tokenizer/tokenizer_ids.json")
_LADDER = "ladder base --out={it} --config.data.dir={made}/data --tokens=1k,2k,4k --config.workdir={out}"
_LADDER += " --config.model.n_layers=2 --config.model.d_model=64 --config.model.n_heads=4 --config.model.d_ff=128"
_LADDER += " --config.train.steps=40 --config.train.batch_size=8 --config.train.seq_len=32 --config.plan.measure=never"
_LADDER += " --config.optim.warmup_steps=4 --config.eval.batch_size=8 --config.eval.max_batches=2"
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
PREPARED = ("prepared.json", "clusters.json", "timings.json", "examples.jsonl")
TEXTS = ("t.jsonl", "t.jsonl.gz", "t.jsonl.zst", "t.parquet", "t.txt")
MORE = (*(f"one/{name}" for name in TEXTS[:-1]), "one/t.html", "one/t.warc.gz", "one/t.md")
TINY = "--config.data.dir={it} --config.model.n_layers=1 --config.model.d_model=32 --config.model.n_heads=2"
CORE = ("core.yaml", "eval_meta_data.csv", "eval_data/choose.jsonl")
CODE = "--limit=1 --config.eval.data_dir={it} --config.eval.run_code=True"
META, ON_BASE = "checkpoints/0/meta/metadata", "--config.origin={made}/base"
CHATS = ("chats.jsonl", "chats.jsonl.gz", "chats.parquet")
SAYS = "--max-new-tokens=2"
OUT = "--config.data.dir={out} --config.model.vocab_size=300"
# A folder of `made`, the files of it that are mangled, the command. {it} is the folder, {file} the file, {made} the others.
FAST = (
    ("model", MODEL, "import {it} --out={out}"),
    ("gpt2", MODEL[:4], "import {it} --out={out}"),
    ("exported", EXPORT, "import {it} --out={out}"),
    ("exported", ("jaxlm_export.json",), "export {made}/run --to=hf --out={it}"),
    ("adapter", ADAPTER, "plan base --config.origin={it}"),
    ("adapter", ADAPTER, "plan base --config.origin={it} --config.origin_merge=False"),
    ("run", RUN, "report {it}"),
    ("run", (*RUN, META, "checkpoints/0/checksums.json"), "export {it} --to=hf --out={out}"),
    ("run", RUN, "diff {it} {made}/run"),
    ("run", (*RUN, "eval/0/results.json", "eval/0/arc_easy.jsonl"), "compare {it} {made}/run"),
    ("run", RUN, "trace {it} --step=1"),
    ("run", RUN, "plan {it}"),
    ("data", DATA, "trace quickstart --step=1 --config.workdir={out} --config.data.dir={it}"),
    ("data", DATA, "plan quickstart --config.data.dir={it}"),
    ("data", DATA, "tokenize base --config.data.dir={it}"),
    ("data", DATA, "audit base --config.data.dir={it} --config.prepare.workers=1"),
    ("ladder", ("ladder.json",), f"{_LADDER} --plan"),
    ("votes", ("votes.jsonl",), "compare {made}/run {made}/run --votes={file}"),
    ("votes", ("samples.jsonl", "more.jsonl"), "arena {it}/samples.jsonl {it}/more.jsonl --results --store={out}"),
    ("prepared", PREPARED, "tokenize {it}/c.py"),
    ("prepared", PREPARED, "prepare {it}/c.py"),
    ("prepared", PREPARED[:1], "audit {it}/c.py --config.prepare.workers=1"),
)
SLOW = (
    ("ladder", ("ladder.json",), _LADDER),
    ("texts", TEXTS, f"tokenize base --config.data.path={{file}} {OUT}"),
    ("texts", TEXTS, "audit base --config.data.path={file} --config.data.dir={out} --config.prepare.workers=1"),
    ("texts", MORE, "prepare {it}/one --out={out} --config.prepare.workers=1 --config.prepare.report_mb=0"),
    ("items", ("gsm8k.jsonl", "mmlu.json", "arc.jsonl.gz", "sciq.parquet", "hellaswag.jsonl.zst"), "prepare {it}/c.py"),
    ("bundle", CORE, "eval {made}/model --tasks=core:choose --config.eval.data_dir={it}"),
    ("bundle", ("HumanEval.jsonl.gz",), f"eval {{made}}/model --tasks=humaneval {CODE}"),
    ("model", MODEL, f"chat {{it}} --message=hi {SAYS} --config.sample.chat_template=True"),
    ("model", MODEL, f"sample {{it}} one {SAYS}"),
    ("adapter", ADAPTER, f"sample {{it}} one {SAYS}"),
    ("run", RUN, f"sample {{it}} one {SAYS}"),
    ("run", (*RUN, META), "train base --config.origin={it} --config.data.path={made}/texts/t.jsonl"),
    ("run", (*RUN, META), "train {it} --config.data.path={made}/texts/t.jsonl"),
    ("data", DATA, f"train base {TINY}"),
    ("data", DATA, f"doctor base {TINY}"),
    ("posts", CHATS, f"train sft {ON_BASE} --config.data.path={{file}}"),
    ("posts", ("pairs.jsonl",), f"train dpo {ON_BASE} --config.data.path={{file}} --config.train.seq_len=192"),
    ("posts", ("prompts.jsonl",), f"train grpo {ON_BASE} --config.reward.tasks=('gsm8k:{{file}}',)"),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with one of each file, whole."""
    root = tmp_path_factory.mktemp("whole")
    _, params = tiny_hf.weights(root / "model", files=2, qk_norm=True, head_dim=16, vocab_size=450, n_layers=1)
    tiny_hf.byte_level(root / "model")
    (root / "model/generation_config.json").write_text('{"eos_token_id": [0, 2], "bos_token_id": null}')
    (root / "model/special_tokens_map.json").write_text('{"eos_token": {"content": "<|endoftext|>", "lstrip": false}}')
    (root / "model/chat_template.jinja").write_text(TEMPLATE)
    tiny_hf.weights(root / "gpt2", family="gpt2", vocab_size=450, n_layers=1)
    tiny_hf.byte_fallback(root / "gpt2")
    (root / "gpt2/generation_config.json").write_text('{"eos_token_id": 2, "bos_token_id": 1}')
    given = tiny_peft.adapted(params, (1, 2))
    read = {name: np.asarray(leaf) for name, leaf in tree.named_leaves(params)}.__getitem__
    keys = config.resolve(config_files.load("base", ["data.path=x"])).model
    own = hf_config.read(root / "model")[0].items()
    keys = dataclasses.replace(keys, **{key: value for key, value in own if "." not in key})
    content, tensors = peft.to_peft(given, keys, read, (str(root / "model"), None))
    (root / "adapter").mkdir()
    (root / "adapter" / peft_config.CONFIG).write_text(json.dumps(content))
    save_file(tensors, root / "adapter" / peft_config.WEIGHTS)
    _run(root)
    _data(root)
    _posts(root)
    _items(root)
    return root


def _run(root):
    assert cli.main(["import", str(root / "model"), f"--out={root / 'run'}"]) == 0
    run = root / "run"
    losses = {"val/loss": 2.0, "time": 1e9}
    rows = ({"step": n, "train/loss": 3.0 / n, "wall_s": 1.0 * n, "tokens": 10 * n} | losses for n in (1, 2, 3))
    (run / "metrics.jsonl").write_text(_lines(rows))
    items = [results.Item(str(n), {"acc": float(n % 2)}) for n in range(9)]
    results.write(run, [results.TaskResult("arc_easy", {"acc": 0.4}, {"acc": 0.1}, 0.25, 5, items)], {"step": 0})
    assert cli.main(["export", str(run), "--to=hf", f"--out={root / 'exported'}"]) == 0


def _data(root):
    tiny_data.make(root / "data", {"a": 1.0, "b": 3.0})
    (root / "texts/one").mkdir(parents=True)
    rng = random.Random(0)
    texts = [f"{n} " + tiny_chats.words(rng, 40) for n in range(60)]
    lines = _lines({"text": text, "url": "http://a.b/c"} for text in texts).encode()
    head = "WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: http://a.b/c\r\n"
    head += "Content-Type: application/http\r\nContent-Length: "
    page = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<html><title>x</title><p>" + texts[0].encode()
    warc = b"".join(gzip.compress(f"{head}{len(page)}\r\n\r\n".encode() + page + b"\r\n\r\n") for _ in range(5))
    for place in (root / "texts", root / "texts/one"):
        (place / "t.jsonl").write_bytes(lines)
        (place / "t.jsonl.gz").write_bytes(gzip.compress(lines))
        (place / "t.jsonl.zst").write_bytes(zstd.compress(lines))
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), place / "t.parquet")
        (place / "t.txt").write_text("\n\n".join(texts))
    (root / "texts/one/t.md").write_text("# Title\n\n" + "\n\n".join(texts))
    (root / "texts/one/t.html").write_text(f"<html><body><p>{texts[0]}</p></body></html>")
    (root / "texts/one/t.warc.gz").write_bytes(warc)
    place = root / "prepared"
    place.mkdir()
    (place / "c.py").write_text(_config("{here}/data", "{here}/t.jsonl", "('unicode', 'exact')"))
    (place / "t.jsonl").write_bytes(lines + lines[: lines.index(b"\n") + 1])  # a duplicate, for examples.jsonl
    assert cli.main(["prepare", str(place / "c.py")]) == 0
    for file in [*(place / "data").iterdir()]:
        shutil.move(file, place / file.name)
    (place / "c.py").write_text(_config("{here}", "{here}/t.jsonl", "('unicode', 'exact')"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor.Supervisor, "run", lambda self: _measured(self.config))
        assert cli.main(_LADDER.format(made=root, it=root / "ladder", out=root / "x").split()) == 0


def _measured(c):
    """Writes down what a rung would have measured."""
    folder = pathlib.Path(c.workdir)
    folder.mkdir(parents=True, exist_ok=True)
    record = {"step": c.train.steps, "val/loss": 2 + 9 / (c.model.d_model * c.train.steps) ** 0.5, "wall_s": 36.0}
    record |= {f"val/{name}/{what}": 2.0 for name in "ab" for what in ("loss", "bits_per_byte")}
    (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    return 0


def _config(data, path, stages, more=""):
    return (
        "import pathlib\nfrom jaxlm.configs import base\n\nhere = str(pathlib.Path(__file__).parent)\n\n\n"
        "def get_config():\n    c = base.get_config()\n    c.model.vocab_size = 320\n    c.prepare.workers = 1\n"
        "    c.prepare.report_mb = 0.0\n"
        f"    c.data.dir = f{data!r}\n    c.prepare.sources.web = base.source(f{path!r}, {stages})\n{more}    return c\n"
    )


def _lines(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _posts(root):
    tiny_chats.base((root / "base").mkdir() or root / "base")
    place = root / "posts"
    place.mkdir()
    tiny_chats.chats(place / "chats.jsonl", 60, turns=2)
    (place / "chats.jsonl.gz").write_bytes(gzip.compress((place / "chats.jsonl").read_bytes()))
    rows = [json.loads(line) for line in (place / "chats.jsonl").read_text().splitlines()]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), place / "chats.parquet")
    tiny_chats.pairs(place / "pairs.jsonl", 60)
    (place / "prompts.jsonl").write_text(_lines({"question": f"{n} one", "answer": f"#### {n}"} for n in range(40)))
    place = root / "votes"
    place.mkdir()
    (place / "votes.jsonl").write_text(_lines({"winner": "ab"[n % 2], "item": n} for n in range(9)))
    for name in ("samples", "more"):
        (place / f"{name}.jsonl").write_text(_lines({"prompt": f"{n}", "text": name} for n in range(9)))


def _items(root):
    rng, place = random.Random(0), root / "items"
    place.mkdir()

    def lines(kind):
        return _lines(kind(rng).record for _ in range(20)).encode()

    (place / "gsm8k.jsonl").write_bytes(lines(tiny_items.gsm8k))
    (place / "mmlu.json").write_text(json.dumps([tiny_items.mmlu(rng).record for _ in range(20)]))
    (place / "arc.jsonl.gz").write_bytes(gzip.compress(lines(tiny_items.arc)))
    (place / "hellaswag.jsonl.zst").write_bytes(zstd.compress(lines(tiny_items.hellaswag)))
    sciq = pyarrow.Table.from_pylist([tiny_items.sciq(rng).record for _ in range(20)])
    pyarrow.parquet.write_table(sciq, place / "sciq.parquet")
    more = "    c.prepare.stages.decontaminate.benchmarks = (here,)\n"
    (place / "docs").mkdir()
    (place / "docs/t.txt").write_text("\n\n".join(tiny_items.story(rng) for _ in range(20)))
    (place / "c.py").write_text(_config("{here}/data", "{here}/docs/*.txt", "('unicode', 'decontaminate')", more))
    place = root / "bundle"
    (place / "eval_data").mkdir(parents=True)
    rows = ({"query": f"{n} is", "choices": ["one", "two two"], "gold": n % 2} for n in range(8))
    (place / "eval_data/choose.jsonl").write_text(_lines(rows))
    entry = {"label": "choose", "dataset_uri": "choose.jsonl", "icl_task_type": "multiple_choice", "num_fewshot": [1]}
    (place / "core.yaml").write_text(json.dumps({"icl_tasks": [entry]}))
    (place / "eval_meta_data.csv").write_text("Eval Task,Random baseline\nchoose,50.0\n")
    (place / "HumanEval.jsonl.gz").write_bytes(gzip.compress(lines(tiny_items.humaneval)))


def fails(command: str, capfd) -> str:
    """What went wrong as a user sees it: the end of the traceback, or an odd exit code; "" if all is well."""
    try:
        code = cli.main(command)
    except (Exception, SystemExit) as error:
        return "".join(traceback.format_exception(error)[-3:])
    said = "".join(capfd.readouterr())
    return said[-3000:] if "Traceback" in said else "" if code in (0, 1, 2, 3) else f"exit code {code}"


@pytest.mark.timeout(0)  # the whole is long
def test_mangled_files_are_a_line_and_never_a_traceback(made, tmp_path, trials, draw, capfd, monkeypatch, request):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    whole, bad, out = request.config.getoption("--trials"), [], tmp_path / "out"
    for number in range(trials(20)):
        folder, names, words = draw.choice(SLOW if whole and draw.random() < 0.2 else FAST)
        it = tiny_mangled.copy(made / folder, tmp_path / "it")
        file = it / draw.choice(names)
        done = tiny_mangled.mangle(file, draw)
        argv = [word.format(it=it, file=file, made=made, out=out) for word in words.split()]
        if argv[0] in ("train", "doctor"):
            argv = [*argv[:2], *(word.format(out=out) for word in TRAINS), *argv[2:]]
        if argv[0] == "plan":
            argv += SHORT
        if wrong := fails(argv, capfd):
            bad.append(f"--- {number}: jaxlm {' '.join(argv)}\n{done[:300]}\n{wrong}")
        shutil.rmtree(out, ignore_errors=True)
        out.unlink(missing_ok=True)
    assert not bad, f"{len(bad)} of them:\n" + "\n".join(bad)
