"""What an evaluation measures does not depend on the machine: rows in memory at a time, devices."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny_chats
import tiny_data
import tiny_models as tiny
from tiny_steps import make_mesh

from jaxlm import config, models
from jaxlm.config import config_files
from jaxlm.eval import held_out
from jaxlm.step.objectives import dpo

MIXTURE, TOKENS = {"a": 3.0, "b": 1.0}, 32
MACHINES = [(6, 1), (2, 8)]  # rows in memory, devices; eight devices take eight rows


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("files"), tiny_chats.tokenizer()
    chats = tiny_chats.make(tiny_chats.chats(folder / "chats.jsonl", 60), tokenizer)
    compared = tiny_chats.make(tiny_chats.pairs(folder / "pairs.jsonl", 60), tokenizer, pairs=True)
    return {"text": tiny_data.make(folder / "data", MIXTURE), "answers": chats, "pairs": compared}


def text(model, data, mesh, settings):
    return held_out.make(model, data, MIXTURE, mesh, settings, seq_len=TOKENS, tile=0)


def of_answers(model, data, mesh, settings):
    return held_out.of_answers(model, data, mesh, settings, tile=0)


def of_pairs(model, data, mesh, settings):
    keys = ["data.path=x", "dpo.loss=simpo", "dpo.margin=0.1"]
    c = dataclasses.replace(config.resolve(config_files.load("base", keys)), model=model.config)
    return held_out.of_pairs(dpo.make(model, c), data, mesh, settings, "float32")


KINDS = {"text": text, "answers": of_answers, "pairs": of_pairs}
LIMITS = ["eval.max_mb=0.0012", "eval.max_examples=11"]
OLDER = ["eval.max_batches=1", "eval.batch_size=3"]
ENGINES = pytest.mark.engines


@pytest.mark.parametrize(
    ("kind", "limits", "within"),
    [
        ("text", LIMITS, 1e-6),
        pytest.param("answers", LIMITS, 1e-6, marks=ENGINES),
        pytest.param("pairs", LIMITS, 1e-6, marks=ENGINES),
        # The same rows; their sum in float32 is over a batch, as it was.
        pytest.param("text", OLDER, 1e-5, marks=ENGINES),
        pytest.param("answers", OLDER, 1e-5, marks=ENGINES),
        pytest.param("pairs", OLDER, 1e-5, marks=ENGINES),
    ],
)
def test_rows_in_memory_and_devices_change_no_held_out_loss(files, kind, limits, within):
    data = files[kind]
    size = data.vocab_size if kind == "text" else data.data.vocab_size
    model = models.build(tiny.model_config(vocab_size=size, max_seq_len=192, n_layers=1), "xla")
    variables = {"params": tiny.random_params(model)}
    limited = config.resolve(config_files.load("base", ["data.path=x", *limits])).eval
    found = []
    for rows, devices in MACHINES:
        mesh = make_mesh(data=devices)
        with jax.set_mesh(mesh):
            settings = dataclasses.replace(limited, batch_size=rows)
            found.append(KINDS[kind](model, data, mesh, settings)(variables)["val/loss"])
    np.testing.assert_allclose(found, found[0], rtol=0, atol=within)
    whole = dataclasses.replace(limited, max_mb=0.0, max_examples=0, older_batches=())
    of_all = KINDS[kind](model, data, make_mesh(), whole)(variables)["val/loss"]
    assert abs(of_all - found[0]) > 10 * within  # the limit is one
