"""Sources of documents: files of many formats, datasets, the embedded corpus; `registry.py` lists the module of each.

A source's path is one of

- a file, a folder (searched with all folders in it), a glob, or a URL that fsspec knows (s3://, gs://, https://): files of
  the formats in `registry.FORMATS`, compressed or not;
- `hub:REPO[:CONFIG][:SPLIT]`: a Hugging Face dataset (see `hub.py`);
- `tfds:NAME[:SPLIT][?key=FEATURE]`: a prepared TFDS dataset in ArrayRecord form (see `tfds.py`);
- `embedded:prose`, `embedded:math`, `embedded:code`: texts that every installation has (see `embedded.py`).

A document's id leads back to the source: `a/b.jsonl:LINE` (from 1), `b.parquet:ROW` (from 0), `notes.txt`,
`notes.txt@BYTE`, `site/page.html`, `crawl.warc.gz@BYTE`, `dump.xml.bz2:PAGEID`, `tfds:name/split/INDEX`,
`numpy.linalg.norm`. Its metadata has "source", "format" and "site", and, if the source tells them, "url", "path",
"licence", "language", "title" and "date".

`units.py` splits a source into units of work and reads them.
"""
