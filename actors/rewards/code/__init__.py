"""Programs against the tests of their prompts, and what of these runs in the sandbox."""
