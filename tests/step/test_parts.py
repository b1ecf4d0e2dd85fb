"""The parts of a config on a mesh: what can be had of them without devices."""

import dataclasses

from tiny_steps import make_config, make_mesh

from jaxlm.config import MeshConfig
from jaxlm.plan.memory import abstract_mesh
from jaxlm.step import parts
from jaxlm.step.objectives import lm


def test_an_abstract_mesh_gives_the_program_of_a_real_one():
    c = make_config()
    c = dataclasses.replace(c, model=dataclasses.replace(c.model, attention="xla"))
    real = parts.make(c, make_mesh(data=2, fsdp=2, tensor=2), lm.make).lower().as_text()
    sizes = MeshConfig(data=2, fsdp=2, tensor=2, context=1)
    assert parts.make(c, abstract_mesh(sizes, 8), lm.make).lower().as_text() == real
    other = MeshConfig(data=8, fsdp=1, tensor=1, context=1)
    assert parts.make(c, abstract_mesh(other, 8), lm.make).lower().as_text() != real


def test_a_new_state_is_where_its_shardings_say():
    c = make_config()
    c = dataclasses.replace(c, model=dataclasses.replace(c.model, attention="xla"))
    made = parts.make(c, make_mesh(fsdp=8), lm.make)
    state, frozen = made.create()
    assert frozen == {}
    assert (
        state.params["params"]["embed"]["embedding"].sharding == made.shardings.params["params"]["embed"]["embedding"]
    )
    assert (int(state.step), int(state.skipped)) == (0, 0)
