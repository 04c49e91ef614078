"""The servers through which agents sample. Every model call becomes a record."""
