"""Batcher: scored groups in, batches out."""
