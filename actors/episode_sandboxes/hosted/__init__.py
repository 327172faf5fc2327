"""Sandboxes of services that others run, by their own packages."""
