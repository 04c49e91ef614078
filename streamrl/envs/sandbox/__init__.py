"""Runs code and text of the policy, which nobody has read, where it can do no harm."""
