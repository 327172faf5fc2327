"""Data of rollouts: tasks, answers, episodes with their trajectories, errors."""
