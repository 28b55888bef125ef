"""Cures stand in both spellings, each means what the other does, and other people's words lead to the right key."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mezzo import Policy, PolicyError, Rule
from mezzo.policy.spelling import both

NAMES = {"Policy": Policy, "Rule": Rule, "policy": Policy.O2("bfloat16").low("tanh")}


@pytest.mark.parametrize(
    "text, python",
    [
        ("O1,bf16", 'Policy.O1("bf16")'),
        ("O0", "Policy.O0()"),
        ("O2,dtype=float16,autocast=true,output_dtype=none", 'Policy.O2("float16", autocast=True, output_dtype=None)'),
        ("O1,dtype=float16,loss_scale=dynamic(init=8,growth=4)",
         'Policy.O1("float16", loss_scale="dynamic(init=8,growth=4)")'),
        ("O2,fp16,loss_scale=1024,low=exp,fp32=log+tan",
         'Policy.O2("fp16", loss_scale=1024).fp32("log", "tan").low("exp")'),
        ("O2,bf16,native=*@head", 'Policy.O2("bf16", rules=[Rule("native", op="*", module="head")])'),
        ("fp32_module=head", 'policy.keep_fp32(modules=["head"])'),
        ("fp32_param=*.scale+b", 'policy.keep_fp32(params=["*.scale", "b"])'),
        ("fp32_math=softmax", 'policy.fp32_math("softmax")'),
        ("low_module=head", 'policy.evolve(rules=[Rule("low", module="head"), *policy.rules])'),
        ("ban=exp@head", 'policy.evolve(rules=[Rule("ban", op="exp", module="head"), *policy.rules])'),
        ("lists=device", 'policy.evolve(lists="device")'),
    ],
)  # fmt: skip
def test_both_spellings_mean_one_policy(text, python):
    assert both(text) == f"{python}, the text {text}"
    made = eval(python, NAMES)
    if text.startswith("O"):
        assert made == Policy.parse(text)
    else:  # what a user adds to a policy
        assert made == Policy.parse(f"O2,dtype=bfloat16,{text},low=tanh")


@given(
    level=st.sampled_from(["O1", "O2", "O3"]),
    dtype=st.sampled_from(["bf16", "bfloat16", "fp16"]),
    entries=st.lists(
        st.sampled_from([
            "output_dtype=none", "lists=device", "norms=fp32_math", "emulate=true", "low=exp+log", "fp32=tan",
            "fp32_module=a+b.*", "fp32_param=c", "promote=gelu",
        ]),
        unique_by=lambda entry: entry.partition("=")[0],
    ),
)  # fmt: skip
def test_any_text_is_the_same_policy_in_python(level, dtype, entries):
    text = ",".join([level, dtype, *entries])
    assert eval(both(text).partition(", the text ")[0], NAMES) == Policy.parse(text)


@pytest.mark.parametrize(
    "given, meant",
    [
        ("keep_fp32=head", "fp32_module=head"),
        ("keep_fp32=head+blocks.*.norm", "fp32_module=head+blocks.*.norm"),
        ("keep_fp32=head.weight", "fp32_param=head.weight"),
        ("keep_fp32=softmax", "fp32=softmax"),
        ("keep_fp32_modules=head", "fp32_module=head"),
        ("keepfp32=head", "fp32_module=head"),
        ("kep_fp32=head", "fp32_module=head"),
        ("float32_module=head", "fp32_module=head"),
        ("fp32_modules=head", "fp32_module=head"),
        ("modules=head", "fp32_module=head"),
        ("params=*.scale", "fp32_param=*.scale"),
        ("fp32_params=*.scale", "fp32_param=*.scale"),
        ("half=softmax", "low=softmax"),
        ("half=softmax+head", "low=softmax,low_module=head"),
        ("fp16_module=head", "low_module=head"),
        ("float32=exp", "fp32=exp"),
        ("white_list=softmax", "low=softmax"),
        ("black_list=conv*", "fp32=conv*"),
        ("loss_scaling=1024", "loss_scale=1024"),
        ("compute_dtype=bf16", "dtype=bf16"),
        ("weight_dtype=fp16", "param_dtype=fp16"),
        ("dtyp=bf16", "dtype=bf16"),
        ("fp23=exp", "fp32=exp"),
        ("fp32=head", "fp32_module=head"),
        ("low=head", "low_module=head"),
        ("low=sofmax", "low=softmax"),
        ("ban_module=head", "ban=*@head"),
        ("promote_module=head", "promote=*@head"),
        ("native_module=head", "native=*@head"),
        ("fp32_math_module=head", "fp32_math=*@head"),
        ("ban_param=head.weight", "fp32_param=head.weight"),
    ],
)
def test_another_word_is_answered_with_the_one_that_is_meant(given, meant):
    """In both spellings, and what is answered is taken."""
    with pytest.raises(PolicyError) as caught:
        Policy.parse(f"O1,{given}")
    assert f"the text {meant}" in str(caught.value)
    Policy.parse(f"O2,{meant}")


@pytest.mark.parametrize("text", ["O1,reduce=fp32", "O1,reduce_dtype=fp32", "O1,accumulate=native", "O1,flurb=3"])
def test_a_word_for_what_cannot_be_otherwise_suggests_no_other(text):
    with pytest.raises(PolicyError, match="unknown policy key") as caught:
        Policy.parse(text)
    assert "did you mean" not in str(caught.value)
    assert "policy.evolve" not in str(caught.value)


@pytest.mark.parametrize(
    "make, cure",
    [
        (lambda: Policy.parse("O2,bf16,master_weights=false"), "O3,dtype=bfloat16,keep_batchnorm_fp32=true"),
        (lambda: Policy.O2("fp16", master_weights=False), "O3,dtype=float16,keep_batchnorm_fp32=true"),
        (lambda: Policy.O3("bf16", master_weights=True), "O2,dtype=bfloat16,keep_batchnorm_fp32=false"),
        (lambda: Policy.O2(torch.bfloat16).evolve(master_weights=False), "O3,dtype=bfloat16,keep_batchnorm_fp32=true"),
    ],
)
def test_masters_are_a_matter_of_the_level(make, cure):
    with pytest.raises(PolicyError, match="unknown policy key 'master_weights'") as caught:
        make()
    assert f"  write  {both(cure)}" in str(caught.value)
    assert Policy.parse(cure).master_weights == (cure[:2] == "O2")


@pytest.mark.parametrize("text", ["O1,master_weights=false", "O2,master_weights=true", "O3,master_weights=false"])
def test_masters_that_the_level_has_anyway_are_left_out(text):
    with pytest.raises(PolicyError, match=rf"write  {text[:2]} without master_weights$"):
        Policy.parse(text)


@pytest.mark.parametrize(
    "make, cure",
    [
        (lambda: Policy.O1(fp32_module="head"), "fp32_module=head"),
        (lambda: Policy.O1(keep_fp32=["a", "b"]), "fp32_module=a+b"),
        (lambda: Policy.O1(low=["softmax"]), "low=softmax"),
        (lambda: Policy.O1(lists="portabel"), "lists=portable"),
        (lambda: Policy.O2().evolve(scale=8.0), "loss_scale=8.0"),
        (lambda: Policy.O1(autocast=False), "O1,dtype=float16"),
        (lambda: Rule("ban", module="head"), "ban=*@head"),
    ],
)
def test_pythons_words_are_answered_in_both_spellings(make, cure):
    with pytest.raises(PolicyError) as caught:
        make()
    assert both(cure) in str(caught.value)


@pytest.mark.parametrize(
    "entry",
    [
        "bf17", "fp8", "tf32", "dtype", "autocast", "loss_scale", "low", "fp32_module=", "low_param=", "emulate=on",
        "dtype==bf16", "dtyp=bf16", "lists=devices", "precision=16-mixed", "fp32_modul=head", "FP32_MODULE=head",
        "low=softmaxx", "fp32=exp_", "ban_module=head", "native_param=x", "fp32_module=a b", "rules=x",
        "fp32=nn.Sequential", "half=softmax", "O3", ",lists=device", "level=O3", "loss_scale=dynamic(init=8",
        "keep_fp32=head", "low=exp,fp32=exp", "param_dtype=fp32,autocast=false",
    ],
)  # fmt: skip
def test_the_text_of_a_cure_is_one_and_so_is_its_python(entry):
    with pytest.raises(PolicyError, match="  write  ") as caught:
        Policy.parse(f"O2,fp16,{entry}")
    cures = re.findall(r"([\w.]+\(.*\)|dtype=\S+), the text (\S+[^\s;,])", str(caught.value))
    assert cures
    for python, text in cures:
        begin = "" if text.startswith("O") else "O2," if text.startswith("dtype") else "O2,bf16,low=tanh,"
        policy = Policy.parse(begin + text)
        if python.startswith("policy"):
            made = eval(python, NAMES)
            assert set(made.rules) == set(policy.rules)
            assert made.evolve(rules=()) == policy.evolve(rules=())
