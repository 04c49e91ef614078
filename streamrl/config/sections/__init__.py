"""The sections of a run file: what can be set, with unit and default."""
