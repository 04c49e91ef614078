"""What a run is: its run file, its settings, and what they mean."""
