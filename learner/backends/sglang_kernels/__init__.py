"""SGLang's kernels, for `model.numerics=sglang`."""
