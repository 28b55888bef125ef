"""Small tensors one behind the other."""

import pytest
import torch

from mezzo.step.runs import packed, run, stands_alone


def flat(tensor):
    return tensor.flatten() if tensor.is_contiguous() else tensor.t().flatten()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16])
def test_packed_tensors_keep_values_and_strides_and_make_one_run(dtype):
    tensors = [torch.arange(n).to(dtype) for n in (5, 1, 7)]
    tensors.insert(1, torch.arange(6).to(dtype).view(2, 3).t())
    copies = packed(tensors)
    for tensor, copy in zip(tensors, copies, strict=True):
        assert torch.equal(tensor, copy)
        assert tensor.stride() == copy.stride()
    whole = run([flat(copy) for copy in copies])
    assert torch.equal(whole, torch.cat([flat(tensor) for tensor in tensors]))
    whole.zero_()
    assert not any(copy.any() for copy in copies)


def test_planes_make_a_run_each():
    tensors = [torch.arange(2 * n, dtype=torch.uint8).view(2, n) for n in (3, 4)]
    copies = packed(tensors, planes=True)
    for plane in (0, 1):
        assert torch.equal(run([copy[plane] for copy in copies]), torch.cat([tensor[plane] for tensor in tensors]))


def test_what_does_not_lie_together_is_no_run():
    one, other = packed([torch.zeros(3), torch.zeros(4)])
    assert run([one, other]) is not None
    assert run([other, one]) is None
    assert run([one, torch.zeros(4)]) is None
    assert run([one, one]) is None


def test_what_may_be_packed():
    whole = torch.zeros(4, 6)
    assert stands_alone(whole)
    assert stands_alone(whole.t())
    assert not stands_alone(whole[0])
    assert not stands_alone(whole[:, ::2])
    assert stands_alone(torch.zeros(2, 8, dtype=torch.uint8), planes=True)
    assert not any(stands_alone(copy) for copy in packed([torch.zeros(3), torch.zeros(4)]))
