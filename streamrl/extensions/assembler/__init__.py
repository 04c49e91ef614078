"""Makes rollouts of sessions and their rewards."""
