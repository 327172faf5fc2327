"""The trainer on megatron-core, its critic, sharding, checkpoints."""
