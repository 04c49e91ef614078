"""Shows how a run is doing: its metrics, its health, its state and its report."""
