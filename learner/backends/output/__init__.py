"""Log-probs, entropy and losses without [T, V], for every backend."""
