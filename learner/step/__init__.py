"""One step of reinforcement learning, of the critic, of the warm-up."""
