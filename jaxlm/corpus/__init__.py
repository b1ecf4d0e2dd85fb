"""Turns raw documents into documents fit for training: reads, cleans, deduplicates, decontaminates and audits them."""
