"""A run as a whole: its parts are started and watched, and its state and metrics are shown."""
