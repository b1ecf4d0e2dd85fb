"""One optimizer step, pure: (frozen, state, batch) -> (state, metrics). No files, no clocks, no loop."""
