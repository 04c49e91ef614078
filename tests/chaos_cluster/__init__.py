"""A cluster of three brokers that are restarted, killed, stopped, filled and slowed down under real
parts, next to plain transactional producers. `make chaos-cluster`; docs/reliability.md.

known.py (the run, its envs, and their server) -> part.py, control.py (the processes) -> brokers.py
(the cluster, and what is done to it) -> harness.py (does it, and measures) -> report.py
"""
