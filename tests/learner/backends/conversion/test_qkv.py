import pytest
import torch

from learner.backends.megatron.model.attention.qkv import HeadSettings, split_heads

GROUPS, EACH, WIDTH, TOKENS = 2, 3, 8, 5


def inputs(dtype=torch.float64, *, normed=True):
    torch.manual_seed(0)
    mixed = torch.randn(TOKENS, 1, GROUPS * (EACH + 2) * WIDTH, dtype=dtype).requires_grad_()
    weights = [torch.randn(WIDTH, dtype=dtype).requires_grad_() if normed else None for _ in range(2)]
    angles = torch.rand(TOKENS, 1, WIDTH // 2, dtype=dtype)
    cos, sin = (torch.cat(parts, -1) for parts in ([angles.cos()] * 2, [-angles.sin(), angles.sin()]))
    return mixed, *weights, (cos, sin), HeadSettings(groups=GROUPS, width=WIDTH, eps=1e-6)


def plain(mixed, query_weight, key_weight, rotation, settings):
    """Compute the same with megatron-core's and transformers' own operations."""
    heads = mixed.view(TOKENS, GROUPS, EACH + 2, WIDTH)
    query, key, value = heads.split([EACH, 1, 1], dim=2)
    cos, sin = rotation
    results = []
    for x, weight in ((query.reshape(TOKENS, -1, WIDTH), query_weight), (key[:, :, 0], key_weight)):
        if weight is not None:
            x = torch.nn.functional.rms_norm(x, (WIDTH,), weight, settings.eps)
        first, second = x.chunk(2, -1)
        results.append(x * cos + torch.cat((second, first), -1) * sin)
    return *results, value[:, :, 0]


@pytest.mark.parametrize("normed", [True, False])
def test_heads_are_split_normed_and_rotated(normed):
    arguments = inputs(normed=normed)
    for ours, expected in zip(split_heads(*arguments), plain(*arguments), strict=True):
        assert torch.allclose(ours, expected, rtol=1e-12)


@pytest.mark.parametrize("normed", [True, False])
def test_gradients_are_those_of_the_separate_operations(normed):
    arguments = inputs(normed=normed)
    leaves = [x for x in arguments[:3] if x is not None]
    weights = [torch.randn_like(x) for x in plain(*arguments)]

    def gradients(function):
        total = sum((x * weight).sum() for x, weight in zip(function(*arguments), weights, strict=True))
        return torch.autograd.grad(total, leaves)

    for ours, expected in zip(gradients(split_heads), gradients(plain), strict=True):
        assert torch.allclose(ours, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("normed", [True, False])
def test_what_heads_are_made_of_stays_where_the_gradient_of_norms_needs_it(normed):
    mixed, *rest = inputs(normed=normed)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(place(x)) or x, lambda x: x):
        value = split_heads(mixed, *rest)[2]
    assert [place(mixed) in kept, place(value) == place(mixed)] == [normed, normed]


def place(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def test_in_bfloat16_all_is_rounded_once():
    exact = split_heads(*inputs(torch.float32))
    mixed, query_weight, key_weight, rotation, settings = inputs(torch.float32)
    low = [x.detach().bfloat16() for x in (mixed, query_weight, key_weight, *rotation)]
    wide = split_heads(*(x.float() for x in low[:3]), [x.float() for x in low[3:]], settings)
    for narrow, expected, true in zip(split_heads(*low[:3], low[3:], settings), wide, exact, strict=True):
        assert torch.equal(narrow, expected.bfloat16())
        assert torch.allclose(narrow.float(), true, atol=0.1)
