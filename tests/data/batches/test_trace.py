"""From a step back to its documents."""

import json

import numpy as np

from jaxlm.data.batches import loader, rows
from jaxlm.data.shards import mixture

MIXTURE = {"prose": 87, "math": 10, "code": 3}
OPTIONS = {"seed": 7, "seq_len": 24, "batch_size": 8}


def test_trace_names_the_documents_that_the_loader_yields(data, corpus):
    raw = {
        (source.name, f"{source.name}.jsonl:{number}"): json.loads(line)["text"]
        for source in corpus.sources
        for number, line in enumerate(open(source.spec), start=1)
    }
    coder = data.tokenizer()
    with loader.TrainLoader(rows.Rows(data, MIXTURE, **OPTIONS), start_step=3) as batches:
        for step in range(3, 23):
            batch = next(batches)
            traced = rows.describe_batch(rows.Rows(data, MIXTURE, **OPTIONS), step)
            assert [r.slot for r in traced] == list(range(8))
            for row in traced:
                ids = np.append(batch["tokens"][row.slot], batch["targets"][row.slot, -1])
                assert "".join(d.text for d in row.documents) == coder.decode(ids)
                assert sum(d.tokens for d in row.documents) == 25
                for document in row.documents:
                    whole = raw[row.source, document.doc_id]
                    assert document.text in whole
                    assert document.first_token > 0 or whole.startswith(document.text)


def test_trace_knows_the_final_mixture(data):
    final = mixture.Final({"math": 3, "code": 1}, share=0.5, steps=12)
    order, plain = rows.Rows(data, MIXTURE, **OPTIONS, final=final), rows.Rows(data, MIXTURE, **OPTIONS)
    coder = data.tokenizer()
    with loader.TrainLoader(order, start_step=4) as batches:
        for step in range(4, 9):
            batch, traced = next(batches), rows.describe_batch(order, step)
            for row in traced:
                ids = np.append(batch["tokens"][row.slot], batch["targets"][row.slot, -1])
                assert "".join(d.text for d in row.documents) == coder.decode(ids)
            assert ({row.source for row in traced} == {"math", "code"}) == (step >= 6)
            assert (traced == rows.describe_batch(plain, step)) == (step < 6)
