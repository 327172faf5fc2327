"""Answers to held-out prompts."""
