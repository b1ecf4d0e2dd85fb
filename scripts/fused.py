"""Checks in the text of a lowered or compiled train step that its attention is fused, with no silent fallback."""

import dataclasses
import re

# The custom calls that show a fused backend: (in the forward pass, in the backward pass).
_CALLS = {
    "cudnn": (r"__cudnn\$fmha\w*Softmax(?!\w*Backward)", r"__cudnn\$fmha\w*Backward"),
    "cudnn_packed": (r"__cudnn\$fmhaSoftmax(?!\w*Backward)", r"__cudnn\$fmhaSoftmaxBackward"),
    "tokamax": (r"mosaic_gpu\w*", r"mosaic_gpu\w*"),
    "pallas": (r"__gpu\$xla\.gpu\.triton|triton_kernel_call", r"__gpu\$xla\.gpu\.triton|triton_kernel_call"),
}
_TARGET = r'(?:custom_call @|custom_call_target=")'


@dataclasses.dataclass(frozen=True)
class Attention:
    """How many calls of a backend's kernels a program has, and how many products with a result [..., T, T] (scores)."""

    forward: int
    backward: int
    score_products: int


def attention_calls(text: str, backend: str, seq_len: int) -> Attention:
    """Returns the counts for StableHLO (`lowered.as_text()`) or compiled HLO (`compiled.as_text()`).

    Args:
      text: the program.
      backend: the attention backend asked for.
      seq_len: T. A product computes scores if its result has three or more dimensions, of which the last two are T x T.
    """
    forward, backward = (
        len(re.findall(f'{_TARGET}"?(?:{pattern})', text)) for pattern in _CALLS.get(backend, (r"(?!)", r"(?!)"))
    )
    t = seq_len
    stable = rf"dot_general[^\n]*-> tensor<(?:\d+x)+{t}x{t}x\w+>"
    compiled = rf"= \(?\w+\[(?:\d+,)+{t},{t}\]\S* (?:dot\(|custom-call\([^\n]*custom_call_target=\"__cublas)"
    return Attention(forward, backward, len(re.findall(f"{stable}|{compiled}", text)))


def check_attention(text: str, backend: str, layers: int, seq_len: int) -> Attention:
    """Raises RuntimeError unless every layer's attention runs in the backend's kernels, forward and backward.

    If the forward and the backward kernel have the same name, each layer must have two of them.

    Args:
      text, backend, seq_len: as in `attention_calls`.
      layers: the required number of kernels of each kind; 1 if the layers are scanned.
    """
    found = attention_calls(text, backend, seq_len)
    wanted = layers * (2 if backend in _CALLS and len(set(_CALLS[backend])) == 1 else 1)
    if found.forward < wanted or found.backward < wanted or found.score_products:
        raise RuntimeError(
            f"attention {backend!r} is not fused: {found.forward} forward and {found.backward} backward kernels for "
            f"{layers} layers, {found.score_products} products of {seq_len} x {seq_len} scores"
        )
    return found
