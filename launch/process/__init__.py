"""What each process has: event loop, signals, exit status, log, probes, connection to the run, torchrun."""
