"""What a reward is, faults of answers, group filters, servers that rewards ask."""
