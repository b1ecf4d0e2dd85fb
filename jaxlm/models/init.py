"""New parameters, each by a program of its own, the same to the bit: those of one shape share theirs.

One program for all of a model's parameters has a random generator for each: 16 layers took 69 s to compile on an H100.
"""

import contextvars
import functools
import typing

import jax
from flax import linen as nn
from jax.sharding import NamedSharding

normal = functools.lru_cache(nn.initializers.normal)  # one function for each deviation, by which programs are shared


class Draw(typing.NamedTuple):
    """How one parameter begins: `init(key, *args)`, at this path in the tree."""

    path: tuple[str, ...]
    init: typing.Callable
    args: tuple
    key: jax.Array


_noted: contextvars.ContextVar[list[Draw] | None] = contextvars.ContextVar("noted", default=None)


def parameter(module: nn.Module, name: str, init: typing.Callable, *args: typing.Any) -> typing.Any:
    """Returns `module.param(name, init, *args)`. Every parameter is made by this function, so that `of` knows them all."""
    noted = _noted.get()
    if noted is None:
        return module.param(name, init, *args)

    def note(key: jax.Array) -> float:
        noted.append(Draw((*module.path, name), init, args, key))
        return 0.0

    with jax.ensure_compile_time_eval():  # so that the key, which Flax makes from the path, is a number and no tracer
        module.param(name, note)
    return init(jax.random.key(0), *args)  # only its shape is used


def of(trace: typing.Callable[[], typing.Any]) -> list[Draw]:
    """Returns the draws of all parameters that `trace`, a model's `init` with a key that is no tracer, would make."""
    noted: list[Draw] = []
    token = _noted.set(noted)
    try:
        jax.eval_shape(trace)
    finally:
        _noted.reset(token)
    return noted


def make(draw: Draw, shardings: typing.Any) -> typing.Any:
    leaves, structure = jax.tree.flatten(shardings)
    return _program(draw.init, draw.args, structure, tuple(leaves))(draw.key)


@functools.lru_cache(maxsize=64)
def _program(
    init: typing.Callable, args: tuple, structure: jax.tree_util.PyTreeDef, leaves: tuple[NamedSharding, ...]
) -> typing.Callable[[jax.Array], typing.Any]:
    return jax.jit(lambda key: init(key, *args), out_shardings=structure.unflatten(leaves))
