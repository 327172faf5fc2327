"""The trainer of any model of transformers, sharded by torch's FSDP2."""
