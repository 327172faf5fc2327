"""`launch doctor`: checks of a host, and what they find."""
