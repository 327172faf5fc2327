"""The learner's processes as torch sees them, sums over them."""
