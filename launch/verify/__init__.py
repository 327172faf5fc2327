"""`launch verify`: what actors, storage and learner wrote down of each trajectory, compared."""
