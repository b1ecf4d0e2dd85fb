"""Cleaning stages that look at one document at a time, one module for each subject; `registry.py` lists them."""
