import json
import math

import pytest
import torch

from lmapp.gradients.clipping import ClipEvent, clip_by_norm, clip_by_value, global_norm


def gradients(*shapes, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype) for shape in shapes]


def exact_norm(tensors):
    return math.sqrt(math.fsum(float(x) ** 2 for tensor in tensors for x in tensor.flatten()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_norm_is_the_norm_of_all_entries_as_one_vector(dtype):
    tensors = gradients((7, 5), (3,), (2, 3, 4), (), dtype=dtype)
    norm = global_norm(tensors)
    assert norm.dtype == torch.float64
    assert norm.shape == ()
    assert norm.item() == pytest.approx(exact_norm(tensors), rel=1e-6)


def test_norm_takes_mixed_dtypes_iterators_and_empty_tensors():
    tensors = [*gradients((4,)), *gradients((5,), dtype=torch.bfloat16), *gradients((6,), dtype=torch.float64)]
    assert global_norm(iter([*tensors, torch.empty(0)])).item() == pytest.approx(exact_norm(tensors), rel=1e-6)


@pytest.mark.parametrize("empty", [[], [torch.empty(0, 3)]])
def test_nothing_has_norm_zero_and_is_not_clipped(empty):
    assert global_norm(empty).item() == 0
    assert clip_by_norm(empty, 1.0, global_norm(empty)) == 1.0
    assert clip_by_value(empty, 1.0).item() == 0


def test_zero_gradients_have_norm_zero():
    assert global_norm([torch.zeros(3), torch.zeros(2, 2)]).item() == 0


def test_norm_and_clipping_agree_with_torch_on_ordinary_input():
    mine = gradients((50, 40), (40,), scale=3.0)
    theirs = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in mine]
    for parameter, gradient in zip(theirs, mine, strict=True):
        parameter.grad = gradient.clone()
    norm = global_norm(mine)
    factor = clip_by_norm(mine, 2.0, norm)
    assert norm.item() == pytest.approx(torch.nn.utils.clip_grad_norm_(theirs, 2.0).item(), rel=1e-6)
    assert factor == pytest.approx(2.0 / norm.item(), rel=1e-15)
    for parameter, gradient in zip(theirs, mine, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("scale", "dtype"), [(1e20, torch.float32), (1e38, torch.float32), (1e37, torch.bfloat16)])
def test_finite_entries_whose_squares_overflow_are_clipped_rightly(scale, dtype):
    tensors = gradients((6, 5), (9,), dtype=dtype, scale=scale)
    before = [tensor.clone() for tensor in tensors]
    norm = global_norm(tensors)
    assert norm.item() == pytest.approx(exact_norm(before), rel=1e-7)
    clip_by_norm(tensors, 1.0, norm)
    digits = 1e-2 if dtype == torch.bfloat16 else 1e-6
    assert global_norm(tensors).item() == pytest.approx(1.0, rel=digits)
    for tensor, old in zip(tensors, before, strict=True):
        torch.testing.assert_close(tensor.double(), old.double() / exact_norm(before), rtol=digits, atol=0)


def test_a_norm_beyond_fp32_is_finite():
    tensors = [torch.full((100,), 3e38)]
    norm = global_norm(tensors)
    assert norm.item() == pytest.approx(3e39, rel=1e-6)
    clip_by_norm(tensors, 0.5, norm)
    torch.testing.assert_close(tensors[0], torch.full((100,), 0.05), rtol=1e-6, atol=0)


def test_float64_entries_of_1e200_are_finite_too():
    assert global_norm([torch.full((4,), 1e200, dtype=torch.float64)]).item() == pytest.approx(2e200)


def test_entries_whose_squares_vanish_in_fp32_have_a_norm():
    assert global_norm([torch.full((4,), 1e-25)]).item() == pytest.approx(2e-25, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_bad_entry_makes_the_norm_non_finite_and_is_never_clipped(bad, dtype):
    tensors = gradients((4, 4), (3,), dtype=dtype)
    tensors[1][2] = bad
    before = [tensor.clone() for tensor in tensors]
    norm = global_norm(tensors)
    assert not torch.isfinite(norm)
    with pytest.raises(ValueError, match="cannot be clipped"):
        clip_by_norm(tensors, 1.0, norm)
    assert not torch.isfinite(clip_by_value(tensors, 0.1))
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor.nan_to_num(7.0), old.nan_to_num(7.0))


def test_inf_is_told_from_nan():
    assert global_norm([torch.tensor([1.0, math.inf])]).item() == math.inf
    assert math.isnan(global_norm([torch.tensor([math.inf]), torch.tensor([math.nan])]).item())


def test_equality_with_the_threshold_is_no_clipping():
    tensors = [torch.tensor([3.0]), torch.tensor([4.0])]
    assert clip_by_norm(tensors, 5.0, global_norm(tensors)) == 1.0
    assert tensors[0].item() == 3.0
    assert clip_by_norm(tensors, 4.999, global_norm(tensors)) == 4.999 / 5.0
    assert tensors[1].item() == pytest.approx(4 * 4.999 / 5, rel=1e-7)


def test_factor_has_no_epsilon():
    tensors = [torch.tensor([3e-6, 4e-6], dtype=torch.float64)]
    clip_by_norm(tensors, 1e-6, global_norm(tensors))
    assert global_norm(tensors).item() == pytest.approx(1e-6, rel=1e-12)


def test_clip_by_value_limits_every_entry_and_returns_the_largest_before():
    tensors = [torch.tensor([-3.0, 0.5]), torch.tensor([[2.0, -0.1]])]
    assert clip_by_value(tensors, 1.0).item() == 3.0
    assert tensors[0].tolist() == [-1.0, 0.5]
    torch.testing.assert_close(tensors[1], torch.tensor([[1.0, -0.1]]))
    assert clip_by_value(tensors, 1.0).item() == 1.0


def test_gradients_of_parameters_are_clipped_in_place_without_a_graph():
    parameter = torch.nn.Parameter(torch.ones(4))
    (10 * parameter).sum().backward()
    held = parameter.grad
    clip_by_norm([parameter.grad], 1.0, global_norm([parameter.grad]))
    assert parameter.grad is held
    assert held.tolist() == [0.5] * 4
    assert not held.requires_grad


def test_event_is_plain_json():
    event = ClipEvent("nonfinite", 12, 0, math.inf, 1.0, 0.0, math.nan, 2e-3, 'so "it"\n wént')
    line = json.dumps(event.as_dict(), allow_nan=False)
    assert json.loads(line) == {
        "kind": "nonfinite",
        "step": 12,
        "epoch": 0,
        "norm": "inf",
        "threshold": 1.0,
        "factor": 0.0,
        "loss": "nan",
        "learning_rate": 2e-3,
        "text": 'so "it"\n wént',
    }
