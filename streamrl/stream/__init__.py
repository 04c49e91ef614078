"""The stream: records, the Kafka log that holds them, and what reads and writes it exactly once."""
