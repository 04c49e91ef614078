"""What a run can have in addition to the loop. Nothing but `cli/` imports it."""
