"""Names of modules and parameters are no patterns: each computes what the same model computes under plain names."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import mezzo
from mezzo import Policy, PolicyError, Rule, numerics, overflow
from mezzo.policy.rules import escaped, exact, matches, separated, split

NAMES = [*"[cls] * ? a,b=c a+b x@y;z (p)# [,] ! ] [!c] [] [[]]".split(), "a b", "[a b]"]
NAME = st.text(st.sampled_from("abc[]*?!,+=@;()# -^{}\\%\n\té"), min_size=1, max_size=8).filter(str.strip)


@settings(max_examples=300, deadline=None)
@given(st.lists(NAME, min_size=1, max_size=4, unique=True), st.sampled_from(["O1,dtype=bfloat16", "O2,dtype=float16"]))
def test_a_text_writes_every_name(names, level):
    """The rule on a path matches that path alone, and survives the text and what a text splits."""
    for name in names:
        assert {other for other in (*names, "c", "a") if matches(other, exact(name))} == {name}
        assert escaped(exact(name)) == exact(name)
    rules = [Rule("fp32", module=exact(name)) for name in names]
    rules += [Rule("low", param=exact(f"{name}.weight")) for name in names]
    rules += [Rule("fp32_math", op="softmax", module=exact(name)) for name in names]
    policy = Policy.parse(level).evolve(rules=rules)
    assert Policy.parse(str(policy)) == policy
    assert split(str(policy))[2].startswith("fp32_module=")
    assert separated(f"{policy};O0", ";") == [str(policy), "O0"]


@given(st.sampled_from(NAMES))
def test_a_file_keeps_every_name(tmp_path_factory, name):
    policy = Policy.O1("bfloat16", rules=[Rule("fp32", module=exact(name), reason="a # counts"), Rule("low", op="exp")])
    path = tmp_path_factory.mktemp("named") / "mine.policy"
    policy.save(path)
    assert Policy.load(path) == policy
    assert Policy.load(path).rules[0].reason == "a # counts"


def network(*names, pinned=None):
    """Three layers, of these names; the class of one of them may be pinned to FP32."""
    torch.manual_seed(0)

    @mezzo.fp32
    class Pinned(nn.Linear):
        pass

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.ModuleDict({name: (Pinned if name == pinned else nn.Linear)(32, 32) for name in names})

        def forward(self, x):
            for layer in self.body.values():
                x = layer(x).tanh()
            return x

    return Network()


def trained(model, policy):
    """What two steps leave, and what is stored in halves, in the order of the layers."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = mezzo.MixedPrecision(model, optimizer, policy)
    x = torch.linspace(-2, 2, 256).reshape(8, 32)
    for _ in range(2):
        with amp.autocast():
            out = model(x)
        amp.backward(out.float().square().mean())
        amp.step()
        amp.zero_grad()
    halves = [isinstance(layer.weight, mezzo.weights.Halves) for layer in model.body.values()]
    amp.close()
    return halves, [out.detach(), *(param.detach() for param in model.parameters())]


def same(one, other):
    assert one[0] == other[0]
    assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


@pytest.mark.parametrize("level", ["O1,bf16", "O2,bf16", "O2,fp16"])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "c"])
def test_what_is_said_of_a_name_is_said_of_that_module(name, level):
    """By its class, by its name as it is, by its glob; on its parameters; with neighbours that a glob would take."""
    by_path = {"body.p": f"body.{name}", "body.p.weight": f"body.{name}.weight"}
    for field, path in (("module", "body.p"), ("param", "body.p.weight")):
        plain = trained(network("p", "q", "r"), Policy.parse(level).evolve(rules=[Rule("fp32", **{field: path})]))
        texts = [exact(by_path[path])] if name in "*?" else [by_path[path], exact(by_path[path])]
        for text in texts:
            policy = Policy.parse(level).evolve(rules=[Rule("fp32", **{field: text})])
            same(trained(network(name, "c", "d"), policy), plain)
            same(trained(network(name, "c", "d"), str(policy)), plain)
    pinned = trained(network("p", "q", "r", pinned="p"), level)
    same(trained(network(name, "c", "d", pinned=name), level), pinned)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("end", [0, 2])
def test_the_ends_are_kept_by_their_names(name, end):
    """A last layer that is called ``*`` is not every layer."""
    plain, odd = ["p", "q", "r"], ["k", "l", "m"]
    odd[end] = name
    for text in ("fp8_module=*", "fp8_param=*", "fp8=linear"):
        same(trained(network(*odd), f"O2,bf16,{text}"), trained(network(*plain), f"O2,bf16,{text}"))
    policy, same_policy = (Policy.O2("bf16").fp8(modules=[f"body.{exact(of[end])}"]) for of in (odd, plain))
    same(trained(network(*odd), policy), trained(network(*plain), same_policy))


def test_a_users_glob_stays_one():
    """And where it is a name, letter by letter, that it would not match, it is that name."""
    model = network("[cls]", "c", "s")
    for text, wanted in (("body.[cs]", [1, 0, 0]), ("body.*", [0, 0, 0]), ("body.[cls]", [0, 1, 1])):
        halves, _ = trained(model, f"O2,bf16,fp32_module={text}")
        assert halves == [bool(flag) for flag in wanted], text
    policy = Policy.O1("bf16").keep_fp32(modules=["body.[cls]"])  # where no model is known
    assert policy.explain("linear", "body.[cls]").treatment == "fp32"
    with numerics.Recorder(model, kinds=("weights",), modules=["body.[cls]"]) as recorder:
        assert [module.path for module in recorder.evidence.header.modules if module.path] == ["body.[cls]"]
    assert trained(network("*", "c", "s"), "O2,bf16,fp32_module=body.*")[0] == [False] * 3


@pytest.mark.parametrize("name", NAMES)
def test_parameters_by_their_names(name):
    def model(key):
        torch.manual_seed(0)
        holder = nn.Module()
        holder.w = nn.ParameterDict({key: nn.Parameter(torch.randn(8, 8)), "c": nn.Parameter(torch.randn(8, 8))})
        return holder

    for text in {exact(f"w.{name}"), f"w.{name}" if name not in "*?" else exact(f"w.{name}")}:
        prepared = mezzo.prepare(model(name), Policy.O2("bf16").keep_fp32(params=[text]))
        stored = {key: isinstance(weight, mezzo.weights.Halves) for key, weight in prepared.model.w.items()}
        assert stored == {name: False, "c": True}


@pytest.mark.parametrize("name", NAMES)
def test_a_cure_works_for_the_name_that_it_is_for(name):
    """What a misspelt rule and `overflow.locate` write."""
    model = network(name, "cc", "dd")
    torch.nn.init.constant_(model.body[name].weight, 3e4)
    with pytest.raises(PolicyError) as caught:
        mezzo.prepare(model, Policy.O1("bf16").keep_fp32(modules=[f"body.{exact(name)}z"]))
    cure = str(caught.value).rpartition("the text ")[2]
    if cure.startswith("fp32_module"):  # it may be nearer to another
        mezzo.prepare(model, f"O1,bf16,{cure}").remove()
    handle = mezzo.prepare(model, "O1,fp16")

    def loss():
        with handle.autocast():
            return model.body[name](torch.full((4, 32), 3e4)).sum()

    report = overflow.locate(loss, model)
    handle.remove()
    cure = report.cure.rpartition("the text ")[2]
    assert cure == f"fp32_module=body.{exact(name)}"
    handle = mezzo.prepare(model, f"O1,fp16,{cure}")
    assert overflow.locate(loss, model) is None
    handle.remove()
