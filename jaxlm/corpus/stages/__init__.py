"""Cleaning stages that look at one document at a time, one module a subject.

`registry.py` lists them by the names that a config uses, and makes a stage from a line of a config. What a stage is stands
in `jaxlm.corpus.stage`.
"""
