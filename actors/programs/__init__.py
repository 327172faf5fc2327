"""Programs of agents: namespaces, limits, and their end with all that they started."""
