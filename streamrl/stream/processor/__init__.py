"""Exactly once: poll, decode, step, and one transaction of outputs and journal."""
