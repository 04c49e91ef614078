"""Chaos: a data path of real processes on a real broker, killed at random moments, and a verdict
from its topics alone. `make chaos`; docs/reliability.md.

known.py (what must come out) -> env.py, learner.py (stand-ins) -> part.py, watched.py (a part, and
what shows of it from outside) -> plan.py (whom to kill, when) -> harness.py (does it) -> verdict.py
(what came of it) -> report.py (table, chaos.json)

"""
