"""Creates new parameters one by one, with the bits that Flax's `init` gives; parameters of one shape share a program.

A single program for all would hold a random generator for each parameter: 16 layers took 69 s to compile on an H100.
"""

import contextvars
import functools
import typing

import jax
from flax import linen as nn
from jax.sharding import NamedSharding

normal = functools.lru_cache(nn.initializers.normal)  # cached, since programs are shared by the identity of `init`


class Draw(typing.NamedTuple):
    """How one parameter is initialised: `init(key, *args)`, at this path in the tree."""

    path: tuple[str, ...]
    init: typing.Callable
    args: tuple
    key: jax.Array


_noted: contextvars.ContextVar[list[Draw] | None] = contextvars.ContextVar("noted", default=None)


def parameter(module: nn.Module, name: str, init: typing.Callable, *args: typing.Any) -> typing.Any:
    """Returns `module.param(name, init, *args)`. All modules create parameters with this function, so that `of` finds them."""
    noted = _noted.get()
    if noted is None:
        return module.param(name, init, *args)

    def note(key: jax.Array) -> float:
        noted.append(Draw((*module.path, name), init, args, key))
        return 0.0

    with jax.ensure_compile_time_eval():  # so that the key, which Flax derives from the path, is concrete
        module.param(name, note)
    return init(jax.random.key(0), *args)  # only its shape is used


def of(trace: typing.Callable[[], typing.Any]) -> list[Draw]:
    """Returns the draws of all parameters that `trace` creates; `trace` calls a model's `init` with a concrete key."""
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
