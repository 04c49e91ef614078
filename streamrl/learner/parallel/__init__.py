"""How devices and processes divide one model."""
