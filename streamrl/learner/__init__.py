"""Learner: batches in, policy versions out."""
