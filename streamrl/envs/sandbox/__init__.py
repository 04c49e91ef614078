"""Where code and text that nobody has read are run."""
