"""Buffer: rollouts in, scored groups out."""
