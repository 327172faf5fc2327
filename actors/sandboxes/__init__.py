"""Python programs of a model: namespaces, limits, filter of system calls."""
