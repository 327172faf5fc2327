"""What an environment acts with: it renders, samples and records tokens."""
