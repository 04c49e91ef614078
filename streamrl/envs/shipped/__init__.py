"""The envs that come with streamrl, one a file; `ENVS` in envs/catalog.py names them.

Three files are no envs but what several share: `samples.py` reads problems from files, `tools.py`
calls of tools, and `arithmetic.py` expressions. `math_verify.py` is a reward.
"""
