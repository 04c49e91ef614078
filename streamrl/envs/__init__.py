"""Envs: the protocols for their authors, the process that runs one, and the shipped ones."""
