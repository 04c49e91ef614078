"""Scorer: batches in, the logprobs of the reference model out."""
