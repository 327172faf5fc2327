"""Figures of a step, their ranges, alarms, log-probs for the dashboard."""
