"""What files from elsewhere may hold: a row for each place that once ended in a traceback, or in silence."""

import gzip
import json
import os
import pathlib
import shutil

import pytest
import tiny_hf
import tiny_mangled
from backports import zstd

from jaxlm.cli import cli
from jaxlm.config import ConfigError, branch, config_files
from jaxlm.corpus import documents, prepare
from jaxlm.corpus.benchmarks import reading
from jaxlm.corpus.sources import files as sources
from jaxlm.corpus.sources import units
from jaxlm.data.chats import chat
from jaxlm.data.tokenizer import coder
from jaxlm.eval import core, results
from jaxlm.host import files
from jaxlm.interop import export, hf_config, hf_folder, peft_config
from jaxlm.plan.ladder import ladder
from jaxlm.plan.sweep import sweep
from jaxlm.plan.tune import machines
from jaxlm.run import ledger, metrics, workdir
from jaxlm.run.checkpoints import meta, mirror_worker, remote, verify
from jaxlm.run.checkpoints.damage import CorruptCheckpointError
from jaxlm.train import outlook

pytest.importorskip("tokenizers")
DEEP = tiny_mangled.DEEP.encode()
LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}


def put(folder: pathlib.Path, name: str, content: bytes) -> pathlib.Path:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("content", [DEEP, b'{"a": ' * 300 + b"1" + b"}" * 300, b"[1]", b"\xff", b"{", b"1" * 9999])
def test_json_that_is_deep_or_no_table_is_a_value_error(content):
    with pytest.raises(ValueError, match=r"it |JSON|decode|Expecting|digits|codec"):
        files.json_of(content)
    assert files.json_of(b'{"a": [1, NaN]}')["a"][0] == 1


# The file, who reads it, and what comes of it where it is nested too deeply: an error, or what counts as nothing known.
READERS = {
    "config.json": (lambda f: config_files.from_run(f / "config.json"), ConfigError),
    "config.json of a folder": (lambda f: config_files.find(str(f)).kind, "run"),
    "config.json of a model": (hf_config.is_model, False),
    "adapter_config.json": (peft_config.read, ConfigError),
    "ladder.json": (ladder.read, ConfigError),
    "sweep.json": (sweep.read, ConfigError),
    "mixture.json": (documents.mixture, ConfigError),
    "rows.jsonl": (lambda f: core.read(str(f)), ConfigError),
    "results.json": (results.read, ConfigError),
    "meta/metadata": (lambda f: meta.read(f), CorruptCheckpointError),
    "checksums.json": (verify.read_checksums, None),
    "run.json": (lambda f: ledger.read(f)["starts"], []),
    "metrics.jsonl": (lambda f: metrics.read(f / "metrics.jsonl"), {}),
    "spikes.jsonl": (lambda f: files.json_lines(f / "spikes.jsonl"), []),
    "examples.jsonl": (prepare.examples, []),
    "tokenizer_config.json": (lambda f: _tokenizer(f), ConfigError),
    "sealed": (lambda f: remote.unseal((f / "sealed").read_bytes()), None),
    "items.jsonl": (lambda f: [*reading.records(str(f / "items.jsonl"))], ConfigError),
    "items.json": (lambda f: [*reading.records(str(f / "items.json"))], ConfigError),
}


def _tokenizer(folder):
    saved = (folder / "tokenizer_config.json").read_bytes()
    tiny_hf.byte_level(folder)
    return coder.load(put(folder, "tokenizer_config.json", saved))


@pytest.mark.parametrize("name", READERS)
def test_deep_json_is_told_where_it_is_read(name, tmp_path):
    read, comes = READERS[name]
    folder = put(tmp_path / "7", documents.MIXTURE if name == "mixture.json" else name.partition(" ")[0], DEEP)
    if isinstance(comes, type) and issubclass(comes, Exception):
        with pytest.raises(comes):
            read(folder)
    else:
        assert read(folder) == comes


def test_deep_json_of_machines_is_nothing_known(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    put(tmp_path, ".cache/jaxlm/machines.json", DEEP)
    assert machines.known("cpu", 1, "k") is None


LLAMA = {
    "model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64,
    "num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": 300,
}  # fmt: skip
WRONG = {
    "a text for a number": {"hidden_size": "32"},
    "a number for a list": {"architectures": 7},
    "no text in a list": {"architectures": [None]},
    "a list for a kind": {"model_type": []},
    "0 heads": {"num_attention_heads": 0},
    "no heads": {"num_attention_heads": None},
    "a part of a layer": {"num_hidden_layers": 2.5},
    "a list for a table": {"rope_parameters": [1]},
    "a table for a number": {"rope_theta": {}},
    "no number": {"rms_norm_eps": float("nan")},
    "beyond all numbers": {"rope_theta": 10**400},
    "beyond all models": {"vocab_size": 10**30},
    "no length": {"rope_parameters": {"rope_type": "linear"}},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_config_of_wrong_types_is_a_line(wrong, tmp_path, capsys):
    folder = put(tmp_path / "m", "config.json", json.dumps(LLAMA).encode())
    assert hf_config.read(folder)[0]["d_model"] == 32
    put(folder, "config.json", json.dumps(LLAMA | WRONG[wrong]).encode())
    assert cli.main(["plan", "base", f"--config.origin={folder}"]) == 2
    assert str(folder) in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"r": "4"}, {"r": 0}, {"lora_alpha": None}, {"rank_pattern": {"q": []}}, {"trainable_token_indices": [[]]},
        {"trainable_token_indices": 5}, {"base_model_name_or_path": 7}, {"peft_type": []}, {"bias": []},
        {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": "8"}, {"peft_type": "PROMPT_TUNING"},
    ],
    ids=str,
)  # fmt: skip
def test_an_adapter_of_wrong_types_is_a_line(wrong, tmp_path):
    peft_config.read(put(tmp_path, "adapter_config.json", json.dumps(LORA).encode()))
    with pytest.raises(ConfigError, match=f"{tmp_path.name} can't be read"):
        peft_config.read(put(tmp_path, "adapter_config.json", json.dumps(LORA | wrong).encode()))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", b"\xff{{ x }}"),
        ("chat_template.jinja", b"{{ 1 / 0 }}"),
        ("chat_template.jinja", b"{{ messages + 1 }}"),
        ("chat_template.jinja", b"{% for a in range(10 ** 9) %}{% endfor %}"),
        ("chat_template.jinja", b"{{ " + b"(" * 3000),
        ("tokenizer_config.json", b'{"eos_token": "<|endoftext|>", "chat_template": 7}'),
        ("tokenizer_config.json", b'{"eos_token": "<|endoftext|>", "chat_template": [7]}'),
        ("tokenizer_config.json", b'{"eos_token": ["a"]}'),
        ("tokenizer_config.json", b"[]"),
        ("special_tokens_map.json", b"{"),
        ("generation_config.json", b'{"eos_token_id": 100000000000}'),
        ("tokenizer.json", b'{"added_tokens": 7}'),
    ],
    ids=lambda value: repr(value)[:50],
)
def test_a_template_or_a_tokenizer_that_fails_is_a_line(name, content, tmp_path):
    tiny_hf.byte_level(tmp_path, chat_template="{{ messages[0]['content'] }}")
    assert chat.render(coder.load(tmp_path), [{"role": "user", "content": "hi"}]) == "hi"
    put(tmp_path, name, content)
    if name == "generation_config.json":
        (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError):
        chat.render(coder.load(tmp_path), [{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.jsonl.zst", "x.json.gz", "x.parquet"])
@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_torn_files_of_records_are_a_line(name, damage, tmp_path):
    rows = b"".join(json.dumps({"text": f"{n} {os.urandom(9).hex()}"}).encode() + b"\n" for n in range(400))
    checked = {zstd.CompressionParameter.checksum_flag: 1}
    packed = gzip.compress(rows) if name.endswith(".gz") else zstd.compress(rows, options=checked)
    cut, flipped = packed[: len(packed) // 2], packed[:100] + bytes([packed[100] ^ 0xFF]) * 40 + packed[140:]
    raw = cut if damage == "cut" else flipped
    with pytest.raises(ConfigError, match=f"{name} can't be read"):
        list(reading.records(str(put(tmp_path, name, raw) / name)))


ODD = ("²", "٣", "07", "1" * 30, "-1", "1.tmp")


def test_a_folder_with_an_odd_name_beside_checkpoints_is_no_step(tmp_path):
    assert [name for name in ("0", "1200", *ODD) if files.is_step(name)] == ["0", "1200"]
    there = tmp_path / "checkpoints"
    for name in ("5", *ODD):
        (there / name).mkdir(parents=True)
        put(tmp_path, f"eval/{name}/results.json", b'{"tasks": {"t": {"metrics": {"acc": 1}}}}')
        put(tmp_path, f"samples/{name}.jsonl", b'{"prompt": "a", "text": "b"}\n')
    assert branch._step(tmp_path, "latest") == 5
    assert workdir.has_checkpoints(tmp_path)
    assert results.steps(tmp_path) == [5]
    assert [point["step"] for point in outlook._benchmarks(tmp_path / "eval")["t"]] == [5]
    assert len(outlook._samples(tmp_path / "samples")["a"]) == 1 + len(ODD)
    folders = type("Remote", (), {"folders": lambda self, name: [path.name for path in (tmp_path / name).iterdir()]})
    assert mirror_worker.steps(folders()) == [5]
    assert config_files.at_step("run@²") == ("run@²", "")
    shutil.rmtree(there / "5")
    assert not workdir.has_checkpoints(tmp_path)


def test_names_that_are_no_utf8_are_read_and_told(tmp_path):
    raw = os.fsencode(tmp_path) + b"/a\xff.txt"
    with open(raw, "wb") as file:
        file.write(b"one two three")
    (found,) = sources.find(str(tmp_path), "text")
    assert found.name == "a\\udcff.txt"
    assert units.source_signature(str(tmp_path)).startswith("crc32 ")
    assert list(units.iterate_documents(str(tmp_path))) == [("a\\udcff.txt", "one two three")]


def test_a_command_or_a_folder_that_is_no_utf8_is_refused(tmp_path, monkeypatch, capsys):
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/w\xff")
    assert cli.main(["train", "quickstart", f"--config.workdir={odd}"]) == 2
    assert "w\\udcff is no UTF-8" in capsys.readouterr().err
    os.mkdir(odd)
    monkeypatch.chdir(odd)
    assert cli.main(["plan", "quickstart"]) == 2
    assert "w\\udcff is no UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize("ends", ["raise SystemExit(3)", "import sys; sys.exit()", "exit('bye')"])
def test_a_config_that_ends_the_program_is_a_line(ends, tmp_path, capsys):
    put(tmp_path, "c.py", f"def get_config():\n    {ends}\n".encode())
    assert cli.main(["plan", str(tmp_path / "c.py")]) == 2
    assert "c.py: SystemExit" in capsys.readouterr().err


@pytest.mark.faults
def test_no_flipped_bit_of_an_export_is_imported(tmp_path, capsys):
    tiny_hf.weights(tmp_path / "model", vocab_size=450, n_layers=1)
    tiny_hf.byte_level(tmp_path / "model")
    assert cli.main(["import", str(tmp_path / "model"), f"--out={tmp_path / 'run'}"]) == 0
    out = tmp_path / "out"
    assert cli.main(["export", str(tmp_path / "run"), "--to=hf", f"--out={out}"]) == 0
    mark = json.loads((out / export.MARK).read_bytes())
    assert mark["sha256"].keys() == set(mark["files"]) - {"README.md"}
    hf_folder.check_export(out)
    for name in mark["sha256"]:
        raw = (out / name).read_bytes()
        put(out, name, raw[:-3] + bytes([raw[-3] ^ 1]) + raw[-2:])
        with pytest.raises(ConfigError, match=f"{name} is not what jaxlm export wrote"):
            hf_folder.check_export(out)
        put(out, name, raw)
    (out / "README.md").write_text("my own card")
    hf_folder.check_export(out)
    put(out, "model.safetensors", (out / "model.safetensors").read_bytes()[:-1] + b"\x01")
    assert cli.main(["import", str(out), f"--out={tmp_path / 'again'}"]) == 2
    assert "model.safetensors is not what jaxlm export wrote: copy it again" in capsys.readouterr().err
    (out / export.MARK).unlink()
    assert cli.main(["import", str(out), f"--out={tmp_path / 'again'}"]) == 0
