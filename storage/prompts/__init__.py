"""The prompts of a run: their sources and order, curricula, updates of a run that goes on."""
