"""What a learner writes and reads: versions, checkpoints, and tensors of many processes."""
