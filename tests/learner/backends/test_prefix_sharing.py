"""Training that computes common prefixes once does what training that computes each of them does."""
