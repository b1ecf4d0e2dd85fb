"""Serves a model: many requests at once in one batch."""
