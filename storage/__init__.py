"""The storage process."""
