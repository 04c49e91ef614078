"""Soak: a hundred producers for half an hour on a real broker, what goes wrong in such a time, and
what came of it. `make soak`; docs/reliability.md.

known.py (who takes part) -> clock.py (which may be set wrong) -> producers.py, learner.py
(stand-ins) -> part.py (one process) -> disk.py (which may be full) -> harness.py (does it) ->
memory.py, pauses.py (what was seen meanwhile) -> verdict.py (what the topics say) -> report.py
(tables, soak.json)
"""
