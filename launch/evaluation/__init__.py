"""`launch eval`: answers to held-out prompts without a run, and their scores."""
