"""Tells from the records of a run what limits it, and simulates the run under other settings."""
