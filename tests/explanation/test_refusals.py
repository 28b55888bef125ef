"""What cannot be explained says what to write, and nothing of the user's is changed."""

import torch
from torch import nn

from mezzo import PolicyError, UnsupportedError
from mezzo.explanation import explain

from ..support.refusals import refused
from ..support.releases import torchscript


class Calling(nn.Module):
    """A layer, and a function of what it makes."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(4, 1), function

    def forward(self, x):
        return self.function(self.layer(x))


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.doubled = self.layer.weight * 2

    def forward(self, x):
        return x


def crossing(x):
    return nn.functional.binary_cross_entropy(x.sigmoid(), torch.ones(3, 1))


@torchscript
def test_what_cannot_be_explained(two_layers):
    model, x = two_layers
    scripted = nn.Sequential(torch.jit.trace(nn.Linear(4, 4), torch.ones(1, 4), check_trace=False))
    kinds = "a tensor is the model's one argument, a tuple its positional ones, a mapping its keyword arguments"
    one = "write  mezzo.explain(model, (inputs,), policy=policy)   # one argument, whatever it is"
    packed = nn.utils.rnn.pack_sequence([x])
    copies = "the model cannot be copied, and yours must stay as it is\n  where  Cached\n"
    created = "copy.deepcopy: RuntimeError: Only Tensors created explicitly by the user"
    anew = "write  mezzo.explain(build_model(), inputs, policy), a model that has not run"
    before = "write  the module as it was before torch.jit.script or torch.jit.trace"
    scalar = "loss= must return one floating number", "write  loss=lambda output: criterion(output, target)"
    for arguments, loss, error, *words in (
        ((model, [x], "O0"), None, PolicyError, "the inputs are a list\n", kinds, one),
        ((nn.LSTM(4, 4), packed, "O0"), None, PolicyError, "the inputs are a PackedSequence"),
        ((model, {0: x}, "O0"), None, PolicyError, "the inputs are a dict"),
        ((lambda x: x, x, "O0"), None, PolicyError, "a model must be an nn.Module, not function"),
        ((model, x, "O9"), None, PolicyError, "unknown level 'O9'"),
        ((model, x, "O1,fp32_module=heads"), None, PolicyError, "the module glob 'heads' matches no module"),
        ((Cached(), x, "O0"), None, UnsupportedError, copies, created, anew),
        ((scripted, x, "O0"), None, UnsupportedError, "scripted modules cannot be explained", before),
        ((nn.Linear(4, 4, device="meta"), x, "O0"), None, UnsupportedError,
         "a model on the meta device cannot be explained", 'write  model.to_empty(device="cpu")'),
        ((model, x, "O0"), torch.ones(2), PolicyError, *scalar, "where  it returned (2,) torch.float32"),
        ((model, x, "O0"), torch.tensor(1), PolicyError, *scalar, "where  it returned () torch.int64"),
        ((model, x, "O0"), 1.0, PolicyError, *scalar, "where  it returned float"),
        ((Calling(lambda x: x.argmax(-1)), x, "O0"), None, PolicyError, "the model's output holds no floating tensor",
         "write  mezzo.explain(model, inputs, policy, loss=lambda output: …)"),
        ((Calling(crossing), x, "O1,dtype=bfloat16,emulate=true"), None, UnsupportedError,
         "binary_cross_entropy is banned"),
    ):  # fmt: skip
        given = None if loss is None else lambda output, loss=loss: loss
        with refused(error, *words, parts=[model, x]):
            explain(*arguments, loss=given)
