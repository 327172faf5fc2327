"""What these share: plan, runs until their end, results, schedule, curves, pictures."""
