"""The model: its families, layers and heads, in JAX and Levanter."""
