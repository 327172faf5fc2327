"""Which tokens are too far from the policy to be trained on."""
