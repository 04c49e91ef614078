"""The sinks of metrics. Each has a module, with the name that the sink has in the run file."""
