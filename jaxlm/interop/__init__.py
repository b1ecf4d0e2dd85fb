"""Reads and writes other programs' formats."""
