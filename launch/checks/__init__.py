"""What a start refuses or remarks before anything runs, and `launch try`."""
