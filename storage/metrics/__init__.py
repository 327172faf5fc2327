"""The recorder of metrics and evaluations, the rows that it writes, TensorBoard and W&B."""
