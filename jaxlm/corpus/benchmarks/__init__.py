"""Benchmark files: how they are read, which fields of which layout hold the questions and the answers, CORE's rows."""
