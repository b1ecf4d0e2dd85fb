"""DPO and a reward model that are killed: the same command goes on, to the bit; a reference that is lost is missed."""

import pytest
import tiny_chats

pytestmark = pytest.mark.faults
KINDS = {
    "dpo": {"program": "dpo"},
    "reward": {"program": "reward"},
}


@pytest.fixture(scope="module")
def pairs(place):
    """kind -> the options of its runs."""
    path = tiny_chats.pairs(place.root / "pairs.jsonl", 120)
    shared = {"origin": place.whole, "data__path": path, "optim__lr": 0.001, "train__seq_len": 128}
    return {kind: shared | keys for kind, keys in KINDS.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_kill_9_and_the_run_goes_on_to_the_bit(place, pairs, kind):
    place.run(f"{kind}-whole", **pairs[kind])
    run = place.stopped(kind, 10, **pairs[kind])
    assert (run / "reference.npz").exists() == (kind == "dpo")
    if kind == "dpo":
        kept = (run / "reference.npz").read_bytes()
        (run / "reference.npz").unlink()
        said = place.run(kind, code=2, **pairs[kind])
        assert "reference.npz is missing: it holds what the reference says of the pairs" in said
        (run / "reference.npz").write_bytes(kept)
    assert "resuming at step 8" in place.run(kind, **pairs[kind])
    place.assert_exact(kind, f"{kind}-whole")
