"""torch's ``fully_shard`` in a script: what is gathered in which dtype, and what cannot be is told of, or raised."""

import pytest
import torch
import torch.distributed.fsdp  # as torchrun's RANK has it imported

from mezzo.errors import PolicyError
from mezzo.script import Program, run

SCRIPT = """
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)),
    torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)),
    torch.nn.Linear(8, 1),
)
{shard}
optimizer = {optimizer}(model.parameters(), lr=0.01)
x = torch.randn(32, 8)
for step in range(2):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""
BLOCKS = "for block in model[:2]: fully_shard(block)\nfully_shard(model)"


pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def seen(tmp_path):
    """Run a script that shards: the report, and the dtype in which each module's weight is when the module runs."""

    def made(policy, shard=BLOCKS, optimizer="torch.optim.AdamW", before=""):
        path = tmp_path / "script.py"
        path.write_text(before + SCRIPT.format(shard=shard, optimizer=optimizer))
        found = {}

        def note(module, args, output):
            if hasattr(module, "weight"):
                found.setdefault(type(module).__name__ + str(len(output[0])), set()).add(module.weight.dtype)

        with torch.nn.modules.module.register_module_forward_hook(note):
            ended = run(Program(name=str(path)), policy)
        if ended.error is not None:
            raise ended.error
        return ended.report, {name: dtypes.pop() for name, dtypes in found.items() if len(dtypes) == 1}

    return made


@pytest.mark.parametrize(
    "policy, linear, layer_norm, batch_norm, head",
    [
        ("O1,dtype=bfloat16", "float32", "float32", "float32", "float32"),
        ("O2,dtype=bfloat16", "bfloat16", "bfloat16", "float32", "bfloat16"),
        ("O2,dtype=bfloat16,fp32_module=0.1+2", "bfloat16", "float32", "float32", "float32"),
    ],
)
def test_each_module_is_gathered_as_the_policy_says(seen, policy, linear, layer_norm, batch_norm, head):
    report, dtypes = seen(policy)
    found = {name.removeprefix("FSDP"): str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()}
    assert found == {"Linear8": linear, "LayerNorm8": layer_norm, "BatchNorm1d8": batch_norm, "Linear1": head}
    assert report.steps == 2
    assert report.left_alone == {}
    assert report.low_share > 0.9
    assert report.intercepted["fully_shard, to gather weights low"] == 3 if "O2" in policy else len(dtypes) == 4


def test_modules_that_are_gathered_together_are_told_apart_by_their_dtypes(seen):
    shard = "fully_shard([model[1], model[2]])\nfully_shard(model)"
    report, dtypes = seen("O2,dtype=bfloat16,fp32_module=2", shard)
    assert dtypes["FSDPLinear1"] == torch.float32
    assert report.left_alone == {}


def test_a_policy_of_the_scripts_own_makes_way_but_for_how_gradients_are_reduced(seen):
    shard = "fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.float16, torch.float32))\n"
    shard += "group = model._get_fsdp_state()._fsdp_param_group\n"
    shard += (
        "assert str(group.mp_policy).startswith('MixedPrecisionPolicy(param_dtype=None, reduce_dtype=torch.float32')"
    )
    report, dtypes = seen("O1,dtype=bfloat16", shard)
    assert set(dtypes.values()) == {torch.float32}
    assert report.intercepted["MixedPrecisionPolicy, whose dtypes are the policy's"] == 1


def test_a_model_that_the_policy_is_impossible_for_is_gathered_in_fp32_and_told_of(seen):
    report, dtypes = seen("O2,dtype=bfloat16,fp32_module=heads")
    assert set(dtypes.values()) == {torch.float32}
    assert "the module glob 'heads' matches no module" in report.left_alone["Sequential in fully_shard"]


SAM = """
import torch
class SAM(torch.optim.SGD):
    def first_step(self): ...
"""


def test_what_is_gathered_low_already_does_not_train_without_masters(seen):
    with pytest.raises(PolicyError) as error:
        seen("O2,dtype=bfloat16", optimizer="SAM", before=SAM)
    assert str(error.value) == (
        "SAM over FSDPSequential cannot be trained under O2,dtype=bfloat16, and was wrapped or sharded for it already\n"
        "  why    SAM may write weights in first_step, and not in step() alone\n"
        "  write  mezzo run --policy O1,dtype=bfloat16 …, which stores weights in FP32"
    )


def test_sharding_is_torchs_own_again(seen):
    plain = torch.distributed.fsdp.fully_shard
    seen("O2,dtype=bfloat16")
    assert torch.distributed.fsdp.fully_shard is plain


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_fsdp1_is_left_alone_by_name(seen):
    shard = "from torch.distributed.fsdp import FullyShardedDataParallel\n"
    shard += "model = FullyShardedDataParallel(model, device_id=torch.device('cpu'))"
    report, _ = seen("O1,dtype=bfloat16", shard)
    ((what, why),) = report.left_alone.items()
    assert what == "AdamW over Sequential"
    assert why.startswith("the model is wrapped by FullyShardedDataParallel, which is FSDP1\n")
    assert "write  mezzo.fully_shard(model, policy), which is FSDP2" in why
    assert report.alarm == "nothing ran in low precision"
