"""Sessions of agents: their model calls as a tree, and the sequences that it is trained as."""
