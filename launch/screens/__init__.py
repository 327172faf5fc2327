"""The terminal view, `launch status`, tables of runs, curves, the summary, `launch tail`."""
