"""Parameter counts against the models themselves and against the published sizes."""

import dataclasses

import jax
import pytest
import tiny_models as tiny

from jaxlm import config, models
from jaxlm.config import MeshConfig, config_files
from jaxlm.devices import tree
from jaxlm.plan import lower
from jaxlm.plan.flops import adapter_params, count_params, params_by_component
from jaxlm.plan.memory import abstract_mesh

GPUBURNOUT = {
    134_994_432: {"family": "gpt2", "n_layers": 12, "d_model": 768, "n_heads": 12, "n_kv_heads": 0, "d_ff": 3072}
    | {"vocab_size": 32000, "max_seq_len": 1024, "tie_embeddings": False},
    1_038_692_352: {"n_layers": 16, "d_model": 2048, "n_heads": 32, "n_kv_heads": 8, "d_ff": 8192, "vocab_size": 32005},
    3_122_969_600: {"n_layers": 32, "d_model": 2560, "n_heads": 40, "n_kv_heads": 10, "d_ff": 10240}
    | {"vocab_size": 32005},
}


def padding(cfg) -> int:
    tables = 1 if cfg.tie_embeddings else 2
    return tables * (cfg.padded_vocab_size - cfg.vocab_size) * cfg.d_model


@pytest.mark.parametrize("count", GPUBURNOUT)
def test_published_sizes(count):
    cfg = tiny.model_config(**GPUBURNOUT[count])
    assert count_params(cfg) == count
    assert tree.count(models.abstract_params(models.build(cfg, "xla"))) - padding(cfg) == count


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("biases", ["none", "qkv_bias", "bias"])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_count_is_that_of_the_model(family, tied, biases, qk_norm):
    given = {biases: True} if biases != "none" else {}
    cfg = tiny.model_config(family=family, tie_embeddings=tied, qk_norm=qk_norm, head_dim=16, **given)
    shapes = models.abstract_params(models.build(cfg, "xla"))
    assert count_params(cfg) == tree.count(shapes) - padding(cfg)
    parts = params_by_component(cfg)
    assert parts["norm"] == sum(tree.count(x) for n, x in tree.named_leaves(shapes) if "norm" in n)
    assert parts["mlp"] == sum(tree.count(shapes[f"layers_{i}"]["mlp"]) for i in range(cfg.n_layers))
    # The comparison can fail: one bias more or less is seen.
    smaller = jax.tree.leaves(shapes)[1:]
    assert count_params(cfg) != tree.count(smaller) - padding(cfg)


@pytest.mark.parametrize(
    "keys",
    [
        (),
        ("adapter.kind=lora",),
        ("adapter.kind=lora", "adapter.rank=3", "adapter.targets=('attn/[qv]',)", "model.tie_embeddings=False"),
        ("adapter.kind=lora", "model.family=gpt2", "model.n_kv_heads=0", "adapter.without_rows=True"),
        ("adapter.kind=prompt", "adapter.rows=()"),
        ("adapter.kind=prompt", "adapter.rows=('<a>', '<b>')"),
    ],
)
def test_what_an_adapter_trains_is_counted_as_it_is_made(keys):
    c = config.resolve(
        config_files.load("quickstart", ["workdir=w", "program=sft", "optim.name=adamw", "model.vocab_size=256", *keys])
    )
    made = lower.parts_of(
        dataclasses.replace(c, model=tiny.model_config(**_shape(c))), abstract_mesh(MeshConfig(1, 1, 1, 1), 1)
    )
    trained = tree.count(made.abstract.params) if made.frozen else 0
    assert adapter_params(made.config.model, c.adapter) == trained
    assert bool(trained) == bool(keys)


def _shape(c: config.Config) -> dict:
    return {"family": c.model.family, "tie_embeddings": c.model.tie_embeddings, "vocab_size": 256}
