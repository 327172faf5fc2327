"""A model's directory: its configuration, tokenizer and small files, names of weights."""
