"""The envs that come with streamrl."""
