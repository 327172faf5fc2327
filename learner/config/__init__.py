"""The learner's settings, by idea."""
