"""The tokens that losses and corrections see, aggregation, diagnostics, plug-ins and hooks."""
