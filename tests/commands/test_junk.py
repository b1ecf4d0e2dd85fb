"""`jaxlm junk`: which texts it looks at, what it keeps, says and refuses."""

import errno
import json
import shutil

import pytest
import tiny_hf
import tiny_junk

from jaxlm.cli import cli
from jaxlm.commands import junk as program
from jaxlm.host import files

pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The run of an imported model, with samples that say PersonX."""
    root = tmp_path_factory.mktemp("run")
    tiny_hf.weights(root / "model", vocab_size=450, n_layers=1)
    tiny_hf.byte_level(root / "model")
    assert cli.main(["import", str(root / "model"), f"--out={root / 'run'}"]) == 0
    (root / "run/samples").mkdir()
    samples = [{"step": 0, "prompt": f"What is {n}?", "text": f"It is alpha PersonX {n}."} for n in range(4)]
    (root / "run/samples/0.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return root / "run"


def said(capsys, *words) -> tuple[int, str, str]:
    code = cli.main(["junk", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_string_of_the_samples_is_traced_and_nothing_is_drawn(capsys, run, tmp_path):
    data = tiny_junk.make(tmp_path / "d")
    given = (run, f"--config.data.dir={data.path}", f"--tokens={4 * 64}")
    code, out, err = said(capsys, *given)
    head, first, *_ = out.splitlines()
    assert code == 0
    assert head.split() == ["string", "texts", "source", "share", "of_text", "times", "documents", "example"]
    assert first.split()[:4] == ["PersonX", "4", "small", "1"]
    assert f"next: jaxlm trace {run} --string=PersonX --remove=list.jsonl" in err.splitlines()[-1]
    code, out, err = said(capsys, *given, "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert rows == json.loads((run / "junk/0.json").read_text())["strings"]
    assert rows[0]["texts"] == 4
    code, again, err = said(capsys, *given, "--config.program=sft", "--config.data.path=chats.jsonl")
    assert (code, again.splitlines()[1]) == (0, first)
    assert f"next: jaxlm trace {data.path} --string=PersonX" in err
    after, config = shutil.copytree(run, tmp_path / "sft"), json.loads((run / "config.json").read_text())
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text(json.dumps(config | {"data": config["data"] | {"dir": str(data.path)}}))
    (after / "config.json").write_text(json.dumps(config | {"origin": str(tmp_path / "base")}))
    code, of_base, err = said(capsys, after, given[2], "--config.program=sft", "--config.data.path=chats.jsonl")
    assert (code, of_base.splitlines()[1]) == (0, first)
    (run / "metrics.jsonl").write_text('{"step": 1, "train/loss": 3.0, "wall_s": 1.0}\n')
    assert cli.main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "<h2>Junk</h2>" in page
    assert "<code>PersonX</code>" in page


def test_what_is_missing_is_drawn_once_and_without_data_texts_alone_rank(capsys, run):
    code, out, err = said(capsys, run, f"--tokens={40 * 64}")
    assert code == 0
    assert f"no shards in {run / 'data'}: ranked by texts alone; --config.data.dir=DATA" in err
    assert out.splitlines()[0].split() == ["string", "texts"]
    texts = (run / "junk/0.jsonl").read_text()
    assert len(texts.splitlines()) == 40
    assert said(capsys, run, f"--tokens={40 * 64}")[1] == out
    assert (run / "junk/0.jsonl").read_text() == texts


def test_data_that_is_named_must_be_there(capsys, run):
    code, _, err = said(capsys, run, "--config.data.dir=nope")
    assert (code, "no shards in nope" in err) == (2, True)


def test_a_second_process_waits_and_draws_the_rest_alone(capsys, run, monkeypatch):
    kept = len((run / "junk/0.jsonl").read_text().splitlines())
    sizes, held = [], files.lock(run / "junk", "draws texts in", "run")

    def drawn(model, variables, tokenizer, prompts, settings, seed):
        sizes.append(len(prompts))
        return [f"more {seed} {number}" for number in range(len(prompts))]

    def told(line, say=files.console.say):  # while it waits, the first process draws a text and ends
        say(line)
        if line.startswith("another process"):
            with open(run / "junk/0.jsonl", "a") as file:
                file.write(json.dumps({"prompt": "of the first", "text": "process"}) + "\n")
            held.close()

    monkeypatch.setattr(program.samples, "continue_prompts", drawn)
    monkeypatch.setattr(files.console, "say", told)
    code, _, err = said(capsys, run, f"--tokens={(kept + 100) * 64}")
    assert (code, sizes) == (0, [64, 35])
    assert f"another process draws texts in {run}/junk: waiting" in err
    assert "texts to draw" not in err  # nothing is left after the second batch
    assert len((run / "junk/0.jsonl").read_text().splitlines()) == kept + 100


def test_ctrl_c_keeps_what_was_drawn(capsys, run, monkeypatch):
    """Of three batches the third is interrupted; the price is told after the second. A later call draws the rest alone."""
    sizes, kept = [], len((run / "junk/0.jsonl").read_text().splitlines())

    def drawn(model, variables, tokenizer, prompts, settings, seed):
        if len(sizes) == 2:
            raise KeyboardInterrupt
        sizes.append(len(prompts))
        return [f"text {seed} {number}" for number in range(len(prompts))]

    monkeypatch.setattr(program.samples, "continue_prompts", drawn)
    tokens = f"--tokens={(kept + 130) * 64}"
    code, out, err = said(capsys, run, tokens, "--config.hardware.usd_per_hour=3600.0")
    assert (code, out, sizes) == (4, "", [64, 64])
    assert "130 texts to draw: about 0m00s, " in err
    assert "the same command goes on with the texts that it has drawn" in err
    assert len((run / "junk/0.jsonl").read_text().splitlines()) == kept + 128
    sizes[:] = [0]
    assert said(capsys, run, tokens)[0] == 0
    assert sizes == [0, 2]


def test_a_run_on_a_disk_that_is_only_read_is_said(capsys, run, monkeypatch):
    def lock(stack, folder):
        raise OSError(errno.EROFS, "Read-only file system", str(folder))

    monkeypatch.setattr(program, "_lock", lock)
    code, out, err = said(capsys, run)
    assert (code, out) == (1, "")
    assert f"Read-only file system: '{run}/junk'; that disk can't be written here: use a copy of the folder" in err


def test_no_run_is_refused(capsys, tmp_path):
    code, out, err = said(capsys, "quickstart", f"--config.workdir={tmp_path}/none")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "no run in" in err
