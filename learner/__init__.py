"""The learner's rooms, each above those that it imports."""
