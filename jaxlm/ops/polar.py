"""Orthogonalises batches of matrices by the Polar Express (Amsel et al., arXiv:2505.16932); devices share the work.

Legend: N matrices of a stack, P rows, Q columns.
"""

import functools
import math
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

# Number of iterations -> the polynomials a x + b x^3 + c x^5, with the paper's cushion of 0.02. Five are for singular values
# from 1e-3 to 1, three from 1e-2; the five have a margin of 2%, so that rounding to bfloat16 lifts no value above 1.
COEFFICIENTS = {
    3: (
        (8.019540917170843, -22.99868612101966, 16.89897279167333),
        (3.6414329164026444, -2.7254306668601096, 0.5369447488130834),
        (2.6683592264158813, -1.9829365267719736, 0.45325833757757605),
    ),
    5: (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
}
_MARGIN = 1.02
_Coefficients = Sequence[tuple[float, float, float]]
BATCH_BYTES = 256 << 20  # of the matrices that one device orthogonalises at a time
_WIDE = 1.5  # columns / rows from which iterating on Gram matrices takes fewer operations


def orthogonalise(x_NxPxQ: jax.Array, iterations: int = 5) -> jax.Array:
    """Returns the matrices with singular values near 1 and the same singular vectors, in the dtype of `x_NxPxQ`.

    Five iterations bring singular values above a thousandth of the Frobenius norm to within 0.16 of 1, three those above a
    hundredth to within 0.29. Smaller values end lower; a zero matrix stays zero.

    Products of float32 have full precision on every device: the faster TensorFloat-32 would be no better than bfloat16.
    """
    if x_NxPxQ.shape[1] > x_NxPxQ.shape[2]:
        return orthogonalise(x_NxPxQ.mT, iterations).mT
    dtype = x_NxPxQ.dtype
    wide = x_NxPxQ.astype(jnp.float32)
    norm = jnp.sqrt(jnp.sum(jnp.square(wide), axis=(1, 2), keepdims=True))
    x_NxPxQ = (wide / (_MARGIN * norm + 1e-8)).astype(dtype)
    exact = dtype == jnp.float32
    product = functools.partial(jnp.matmul, precision="highest" if exact else None)
    # In bfloat16 the first Gram matrix is too coarse to compute the later ones from it.
    if exact and x_NxPxQ.shape[2] >= _WIDE * x_NxPxQ.shape[1]:
        return _by_gram(x_NxPxQ, COEFFICIENTS[iterations], product)
    for a, b, c in COEFFICIENTS[iterations]:
        gram_NxPxP = product(x_NxPxQ, x_NxPxQ.mT)
        x_NxPxQ = a * x_NxPxQ + product(b * gram_NxPxP + c * product(gram_NxPxP, gram_NxPxP), x_NxPxQ)
    return x_NxPxQ


def _by_gram(x_NxPxQ: jax.Array, coefficients: _Coefficients, product: typing.Callable) -> jax.Array:
    """Returns what `orthogonalise`'s loop returns, but iterates on Gram matrices: each is a polynomial of the previous one."""
    # The product of all polynomials is multiplied once with the matrix: five iterations take 4 P^2 Q + 34 P^3
    # operations, not 20 P^2 Q + 10 P^3.
    one_PxP = jnp.eye(x_NxPxQ.shape[1], dtype=x_NxPxQ.dtype)
    gram_NxPxP, together_NxPxP = product(x_NxPxQ, x_NxPxQ.mT), None
    for number, (a, b, c) in enumerate(coefficients, 1):
        by_NxPxP = a * one_PxP + b * gram_NxPxP + c * product(gram_NxPxP, gram_NxPxP)
        together_NxPxP = by_NxPxP if together_NxPxP is None else product(by_NxPxP, together_NxPxP)
        if number < len(coefficients):
            gram_NxPxP = product(by_NxPxP, product(by_NxPxP, gram_NxPxP))
    return product(together_NxPxP, x_NxPxQ)


_Sides = list[tuple[int, tuple[str, ...]]]  # of a matrix: the size of each, and the mesh axes that shard it


def each(
    arrays: Sequence[jax.Array], inputs: Sequence[int], specs: Sequence[PartitionSpec], iterations: int = 5
) -> list[jax.Array]:
    """Returns the arrays, each orthogonalised as a matrix (inputs, outputs). All must have the same dtype.

    Matrices of the same shape, up to transposition, are stacked, up to BATCH_BYTES on a device. If the current mesh has
    several devices, an all-to-all gives each device its share of whole matrices, and another returns the results to the
    shards of `specs`. For replicated arrays the results are gathered.

    Args:
      inputs: how many leading axes of each array are inputs; the others are outputs.
      specs: the sharding of each array on the current mesh. Only the first input axis and the first output axis may be sharded.
      iterations: a key of COEFFICIENTS.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = () if mesh.empty else tuple(axis for axis, size in mesh.shape.items() if size > 1)
    devices = math.prod(mesh.shape[axis] for axis in axes)
    groups: dict[
        tuple, list[tuple[int, bool]]
    ] = {}  # a stack's sides, the smaller one first -> (index, True if turned)
    for index, (x, count, spec) in enumerate(zip(arrays, inputs, specs, strict=True)):
        sides = _sides(x.shape, count, spec)
        groups.setdefault(tuple(sorted(sides)), []).append((index, sides != sorted(sides)))
    done: dict[int, jax.Array] = {}
    for ((rows, by_row), (columns, by_column)), members in groups.items():
        most = devices * max(1, BATCH_BYTES // (rows * columns * arrays[0].dtype.itemsize))
        trades = [(split, dim) for split, dim in ((by_row, 1), (by_column, 2)) if split]
        copies = tuple(axis for axis in axes if axis not in by_row + by_column)
        for start in range(0, len(members), most):
            batch = members[start : start + most]
            forms = [(inputs[i], turned) for i, turned in batch]
            run = functools.partial(_batch, trades, copies, devices, iterations, forms)
            if axes:
                split = tuple(specs[i] for i, _ in batch)
                run = jax.shard_map(run, in_specs=split, out_specs=list(split), check_vma=False)
            orthogonal = run(*(arrays[i] for i, _ in batch))
            done |= {i: x for (i, _), x in zip(batch, orthogonal, strict=True)}
    return [done[i] for i in range(len(arrays))]


def _sides(shape: tuple[int, ...], inputs: int, spec: PartitionSpec) -> _Sides:
    entries = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]
    entries += [()] * (len(shape) - len(entries))
    parts = slice(inputs), slice(inputs, None)
    if any(entry for part in parts for entry in entries[part][1:]):
        raise ValueError(f"{spec} splits more than the first axis of the {inputs} inputs of {shape} or of its outputs")
    return [(math.prod(shape[part]), entries[part][0]) for part in parts]


def _batch(
    trades: list[tuple[tuple[str, ...], int]],
    copies: tuple[str, ...],
    devices: int,
    iterations: int,
    forms: list[tuple[int, bool]],
    *arrays: jax.Array,
) -> list[jax.Array]:
    """Orthogonalises arrays of one shape. In a `shard_map` takes and returns one device's shards.

    Args:
      trades: the mesh axes that shard rows (1) or columns (2); copies: those that shard neither.
      forms: of each array, how many axes are inputs, and True if its matrix is turned.
    """
    flat = [x.reshape(math.prod(x.shape[:count]), -1) for x, (count, _) in zip(arrays, forms, strict=True)]
    stack_NxPxQ = jnp.stack([x.T if turn else x for x, (_, turn) in zip(flat, forms, strict=True)])
    stack_NxPxQ = jnp.pad(stack_NxPxQ, ((0, -len(arrays) % devices), (0, 0), (0, 0)))
    for split, dim in trades:
        stack_NxPxQ = jax.lax.all_to_all(stack_NxPxQ, split, 0, dim, tiled=True)
    if copies:
        share = stack_NxPxQ.shape[0] // math.prod(jax.lax.axis_size(axis) for axis in copies)
        stack_NxPxQ = jax.lax.dynamic_slice_in_dim(stack_NxPxQ, jax.lax.axis_index(copies) * share, share)
    stack_NxPxQ = orthogonalise(stack_NxPxQ, iterations)
    if copies:
        stack_NxPxQ = jax.lax.all_gather(stack_NxPxQ, copies, axis=0, tiled=True)
    for split, dim in reversed(trades):
        stack_NxPxQ = jax.lax.all_to_all(stack_NxPxQ, split, dim, 0, tiled=True)
    return [
        (x.T if turn else x).reshape(like.shape)
        for x, (_, turn), like in zip(stack_NxPxQ, forms, arrays, strict=False)  # without the padding
    ]
