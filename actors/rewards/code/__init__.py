"""Programs against the tests of their prompts, and what of it runs in the sandbox."""
