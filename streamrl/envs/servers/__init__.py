"""Envs in an environment of their own. `process.py` keeps a server of one running; what runs in
that environment lies in `inside/`, and knows the gateway and nothing of streamrl.
"""
