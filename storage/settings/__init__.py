"""The settings of storage, by section."""
