"""The loss of a batch, per token and as a mean."""
