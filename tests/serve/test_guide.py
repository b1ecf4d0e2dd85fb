"""Which ids may come next, whatever the size of the vocabulary."""

import pytest
import tiny_eval

from jaxlm.serve.guide import Guides


@pytest.mark.parametrize("more", [1, 31, 32, 33])
def test_a_mask_has_a_bit_for_each_id(more):
    coder = tiny_eval.scorer().tokenizer
    size = coder.vocab_size // 32 * 32 + 32 + more
    guide = Guides(coder, size, [coder.eos_id]).of_schema({"type": "object"})()
    allowed = [i for i in range(size) if guide.mask()[i // 32] >> i % 32 & 1]
    assert guide.mask().shape == (-(-size // 32),)
    assert allowed
    assert all(coder.piece_bytes()[i].startswith(b"{") for i in allowed)
