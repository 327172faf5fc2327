"""Following published versions, from the first one on."""
