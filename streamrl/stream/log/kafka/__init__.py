"""The log on Kafka: clients, topics, offsets and access rules."""
