"""What benchmarks of whole runs share: plan, runs until their end, results, schedule, curves, pictures."""
