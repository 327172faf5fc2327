"""One process: child processes, plug-ins, limits of its host, progress of long work."""
