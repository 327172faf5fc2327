"""The tokens that these see, aggregation, diagnostics, plug-ins and hooks."""
