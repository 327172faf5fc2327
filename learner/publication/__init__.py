"""Copy to the host, deltas, announcement, broadcast; adapters for peft."""
