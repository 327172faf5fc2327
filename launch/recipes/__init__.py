"""Settings that `--recipe` names, with their published models and prompts."""
