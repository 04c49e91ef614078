"""The table of poison: records that nobody should write, each given to the parts that read its
topic. `make poison`, and a test of each row.

poisons.py (what is written, and how it must end) -> chain.py (the parts over a log in memory, and
what became of it) -> __main__.py (the table)
"""
