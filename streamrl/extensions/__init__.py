"""What a run can have in addition to the loop. `config/extensions.py` finds it."""
