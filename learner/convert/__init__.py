"""`launch convert`: directories of models in other formats."""
