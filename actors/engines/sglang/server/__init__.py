"""An SGLang server of our own: settings, GPUs, start, health."""
