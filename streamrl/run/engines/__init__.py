"""Engines that place a run on many machines: one file for each."""
