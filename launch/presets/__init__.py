"""Settings that `--preset` names, and programs that some of them start."""
