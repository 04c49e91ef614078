"""Weights: a store that versions go through by claim check."""
