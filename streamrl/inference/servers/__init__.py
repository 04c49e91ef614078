"""Servers: vLLM, and the policy versions that it samples from."""
