"""The processes of a run: bus, storage, learner, actors."""
