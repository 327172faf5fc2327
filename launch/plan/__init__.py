"""`launch plan`: memory and time of a configuration, by formulas."""
