"""Fine-tuning that is killed: the same command goes on, to the bit, whatever is trained; an adapter needs its own base."""

import pytest
import tiny_chats

pytestmark = pytest.mark.faults
KINDS = {
    "full": {},
    "lora": {"adapter__kind": "lora", "adapter__rank": 4, "adapter__dropout": 0.1},
    "qlora": {"adapter__kind": "lora", "adapter__rank": 4, "adapter__quantize": "nf4"},
}


@pytest.fixture(scope="module")
def sft(place):
    """kind -> the options of its runs. The base has no ChatML tokens, so it grows; its text is replayed."""
    path = tiny_chats.chats(place.root / "chats.jsonl", 120)
    shared = {"program": "sft", "origin": place.whole, "data__path": path, "replay__share": 0.2, "optim__lr": 0.01}
    return {kind: shared | keys for kind, keys in KINDS.items()}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "lora"])
def test_kill_9_and_the_run_goes_on_to_the_bit(place, sft, kind):
    place.run(f"{kind}-whole", **sft[kind])
    place.stopped(kind, 10, **sft[kind])
    assert "resuming at step 8" in place.run(kind, **sft[kind])
    place.assert_exact(kind, f"{kind}-whole")


def test_an_adapter_goes_on_with_its_own_base_wherever_that_is_now(place, sft):
    place.run("lora-whole", **sft["lora"])
    run = place.stopped("lora", 10, **sft["lora"])
    moved = place.copy("moved", place.whole.name)
    for keys, words in (
        ({"origin_checkpoint": 20}, f"{place.whole}, step 20 is not the model that {run} began with"),
        ({"origin": place.root / "gone"}, f"no folder {place.root / 'gone'}"),
    ):
        said = place.run("lora", code=2, **sft["lora"] | keys)
        assert words in said
    assert "resuming at step 8" in place.run("lora", **sft["lora"] | {"origin": moved})
    place.assert_exact("lora", "lora-whole")
