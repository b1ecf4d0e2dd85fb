"""What jaxlm is timed against, written with the peers' own means."""
