"""What a run says of itself: metrics, health, its state, its report."""
