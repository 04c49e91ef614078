"""Evaluator: policy versions in, results of held-out problems out."""
