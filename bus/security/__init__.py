"""A secured bus: credentials, permissions, signatures of records, keys of roles."""
