"""Envs in a separate environment. `process.py` keeps a server of one running; what runs in
that environment is in `inside/`, and knows the gateway and nothing of streamrl.
"""
