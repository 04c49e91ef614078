"""Inference: policy versions in, tokens out, over HTTP."""
