"""Orchestrator: starts the parts of a run, watches them and ends it."""
