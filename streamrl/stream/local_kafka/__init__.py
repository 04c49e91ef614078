"""A Kafka without Docker: a broker, and the Java and the jars that it needs."""
