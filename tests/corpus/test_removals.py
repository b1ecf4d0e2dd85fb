"""The lines on what was lost."""

import pytest

from jaxlm.corpus import removals


@pytest.mark.parametrize(("cuts", "told"), [(0, False), (9, False), (10, True)])
def test_cuts_of_the_stage_junk_are_told_from_one_in_a_hundred_documents_on(cuts, told):
    junk = {
        "name": "junk",
        "removed": {},
        "edits": {"placeholder": cuts} if cuts else {},
        "bytes_in": 9,
        "bytes_out": 9,
    }
    read = {"documents": 1000, "failed": {}, "repaired": {}}
    manifest = {"sources": {"web": {"read": read, "kept": {"documents": 1000}, "stages": [junk]}}}
    line = f"junk cut {cuts} parts out of documents of web: {cuts} placeholder (removed/junk.jsonl.gz)"
    assert (line in removals.losses(manifest, {}, ())) == told
