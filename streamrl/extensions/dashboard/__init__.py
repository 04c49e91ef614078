"""Dashboard: a run in the browser, read from its topics."""
