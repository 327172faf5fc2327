"""What the learner and judges use: readers of a step's trajectories, rewards, score tables."""
