"""Where metrics go: a file each, by the name that it has in the run file."""
