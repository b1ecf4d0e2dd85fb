"""From sources to batches: documents -> tokenizer -> shards -> rows -> loader."""
