"""Weights of files to this rank's shards and back; checkpoints of megatron-core."""
