"""Cleaning stages that look at one document at a time, a module a subject; `registry.py` lists them."""
