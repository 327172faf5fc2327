"""Tasks that generate prompts, held-out prompts and demonstrations."""
