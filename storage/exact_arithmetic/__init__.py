"""Exact arithmetic that models of learner and embedded engine share."""
