"""HTML reports: each is one self-contained file, without scripts and without requests."""
