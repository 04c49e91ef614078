"""Bytes in order: topics, readers and writers, on Kafka, in memory and in files."""
