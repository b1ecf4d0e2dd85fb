"""A model that others talk to: rows of a decode engine kept busy, the server, its page."""
