"""Clients: how envs and agents sample from the inference servers of a run."""
