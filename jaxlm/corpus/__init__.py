"""Raw documents -> documents that one can trust: read, clean, deduplicate, decontaminate, audit, report."""
