"""Processes, signals, memory and files of the machine that a part runs on."""
