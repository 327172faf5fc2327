"""What a rollout is."""
