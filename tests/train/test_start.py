"""What a run says when it starts."""

import dataclasses

import jax

from jaxlm import config, config_files, models, sharding
from jaxlm.config import MeshConfig
from jaxlm.models import hardware
from jaxlm.train import start


def test_a_start_names_model_devices_and_length(capsys):
    keys = ["workdir=w", "model.n_layers=3", "train.steps=1000", "train.batch_size=8", "train.seq_len=128"]
    c = config.resolve(config_files.load("quickstart", keys))
    model = hardware.for_platform(c.model, "cpu")
    params = models.abstract_params(models.build(model, model.attention))
    mesh = sharding.make_mesh(MeshConfig(data=1, fsdp=-1, tensor=1, context=1))
    start.announce(dataclasses.replace(model, remat="none"), c.train, {"params": params}, mesh, done=7)
    said = capsys.readouterr().err
    assert (
        "parameters; 8 x cpu (data 1 x fsdp 8 x context 1 x tensor 1); attention blocked, float32, remat none" in said
    )
    assert "resuming at step 7, to step 1000: 1.02M tokens, 1,024 a step" in said
    assert "layers/attn" in said
    assert "layers_0" not in said


def test_layers_are_stacked():
    leaf = jax.ShapeDtypeStruct((4, 2), "float32")
    stacked = start.stacked_shapes({"embed": leaf, "layers_0": {"w": leaf}, "layers_1": {"w": leaf}})
    assert stacked == {"embed": leaf, "layers": {"w": jax.ShapeDtypeStruct((2, 4, 2), "float32")}}
