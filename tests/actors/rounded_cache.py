"""A transformers model whose attention reads keys and values as a cache in another dtype gives them back."""

from contextlib import contextmanager

from transformers.models.qwen3 import modeling_qwen3


@contextmanager
def rounded_cache(model, dtype):
    """Let a Qwen3 compute so while inside: what is cached has its rotary embedding already."""
    plain, ours = modeling_qwen3.eager_attention_forward, model.config._attn_implementation

    def rounding(module, query, key, value, *args, **settings):
        key, value = (each.to(dtype).to(each.dtype) for each in (key, value))
        return plain(module, query, key, value, *args, **settings)

    modeling_qwen3.eager_attention_forward = rounding
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        modeling_qwen3.eager_attention_forward = plain
        model.set_attn_implementation(ours)
