"""How a rollout is made of an env and a policy."""
