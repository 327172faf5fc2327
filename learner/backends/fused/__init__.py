"""Norms, gates and rotations of layers in one kernel each on CUDA, for every backend."""
