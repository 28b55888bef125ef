"""What differences carry besides handlers: torch's own autocast, and what torch.compile asks it."""

import pytest
import torch
from torch._functorch import config
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import mezzo

x = torch.randn(8, 16)


class Products(TorchDispatchMode):
    """Note the dtypes of matrix products."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.dtypes |= {arg.dtype for arg in args if isinstance(arg, torch.Tensor)}
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # Dynamo, of autograd functions
@pytest.mark.parametrize("policy", ["O1,dtype=bfloat16,fp32=linear", "O1,dtype=float16,emulate=true"])
def test_compiled_code_differentiates_products_in_the_precision_they_have_in_eager(policy):
    """torch.compile would trace their gradients under the autocast around the call."""
    torch.compiler.reset()
    weight = torch.randn(16, 16, requires_grad=True)
    compiled = torch.compile(lambda y: functional.linear(y, weight), backend="aot_eager")
    with mezzo.autocast(policy, "cpu"):
        loss = compiled(x).float().square().sum()
    with Products() as products:
        loss.backward()
    assert products.dtypes == {torch.float32}


@pytest.mark.parametrize("before", ["same_as_forward", "default", "off", [{"device_type": "cpu"}]])
def test_the_setting_for_compiled_backward_passes_is_put_back(before):
    inside = before if isinstance(before, list) else "off"
    with config.patch(backward_pass_autocast=before):
        with mezzo.autocast("O1,dtype=bfloat16", "cpu"):
            assert config.backward_pass_autocast == inside
            with mezzo.autocast("O1,dtype=bfloat16,low=softmax", "cpu"):
                assert config.backward_pass_autocast == inside
        with pytest.raises(ZeroDivisionError), mezzo.autocast("O1,dtype=bfloat16", "cpu"):
            _ = 1 / 0
        with mezzo.autocast("O1,dtype=bfloat16,emulate=false,lists=device", "cpu"):
            assert config.backward_pass_autocast == before  # torch's own behaviour throughout
        assert config.backward_pass_autocast == before


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # Dynamo, of autograd functions
def test_a_region_may_be_entered_for_the_first_time_while_torch_compile_traces():
    policy = "O1,dtype=bfloat16,emulate=true,fp32=tanh,low=softplus"  # in no other test

    def run(y):
        with mezzo.autocast(policy, "cpu"):
            return functional.softplus(torch.tanh(y) @ y.mT)

    torch.compiler.reset()
    compiled = torch.compile(run, backend="eager", fullgraph=True)(x)
    expected = run(x)
    assert compiled.dtype == torch.bfloat16
    assert torch.equal(compiled, expected)
