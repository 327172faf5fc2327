"""What the learner asks of a backend, and its frozen policies."""
