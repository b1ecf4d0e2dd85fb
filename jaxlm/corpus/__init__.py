"""Turns raw documents into documents that one can trust: reads, cleans, deduplicates, decontaminates and audits them."""
