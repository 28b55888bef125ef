"""What a policy refuses, and the cures: short, fit for a terminal, in both spellings, each of which means the other."""

import dataclasses
import os
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mezzo import LossScale, Policy, PolicyError, Rule
from mezzo.policy.ops import QUANTISED, TREATMENTS
from mezzo.policy.rules import both, exact, parse_rules

from ..support.refusals import refused


def parse(text):
    return lambda: Policy.parse(text)


#: What is called, and words of the error.
ROWS = [
    # Combinations without a meaning
    (lambda: Policy.O0(dtype="float16"), "O0 cannot compute in float16"),
    (lambda: Policy.O1("float32"), "O1 cannot compute in float32"),
    *((parse(f"{level},param_dtype=bfloat16"), f"{level} has no bfloat16 parameters",
       "O2 stores FP32 weights in two halves, O3's are low",
       f"write  {both('O2,dtype=bfloat16')};\n         or {both('O3,dtype=bfloat16')}")
      for level in ("O0", "O1", "O2")),
    (lambda: Policy.O2("bf16", param_dtype="bf16"), "O2 has no bfloat16 parameters", both("O2,dtype=bfloat16")),
    (lambda: Policy.O3(param_dtype="bfloat16"), "weights cannot be bfloat16 while ops compute in float16",
     both("O3,dtype=bfloat16"), both("O3,dtype=float16")),
    (lambda: Policy.O3("bf16", param_dtype="fp32"), "O3 with float32 weights has nothing in bfloat16",
     both("O1,dtype=bfloat16"), both("O2,dtype=bfloat16")),
    (lambda: Policy.O1(keep_batchnorm_fp32=False), "has no effect in O1", both("O3,dtype=float16")),
    (lambda: Policy.O0(keep_batchnorm_fp32=False), "has no effect in O0", both("O3,dtype=bfloat16")),
    (lambda: Policy.O3(loss_scale=128.0), "fp16 gradients cannot be unscaled in fp16"),
    (lambda: Policy.O3("bf16").evolve(dtype="fp16"), "weights cannot be bfloat16", "the text O3,dtype=float16"),
    (lambda: Policy.O0(dtype="float16", keep_batchnorm_fp32=False),
     "2 problems\n1. O0 cannot compute in float16", "2. keep_batchnorm_fp32=false"),
    # Words
    (parse("O4"), "unknown level 'O4'", "valid: O0, O1, O2, O3"),
    (parse("O1,dtype=flaot16"), "unknown dtype 'flaot16'", "did you mean 'float16'?"),
    (parse("O2,dtype=bf1"), "unknown dtype 'bf1'", "the text dtype=bfloat16"),
    (lambda: Policy.O1("bfloat61"), "unknown dtype 'bfloat61'", "did you mean 'bfloat16'?"),
    (lambda: Policy.O1(torch.float64), "unknown dtype 'float64'", "valid: bfloat16, float16, float32"),
    (parse("O1,keep_batchnrom_fp32=true"), "unknown policy key", "'keep_batchnorm_fp32'?"),
    (lambda: Policy.O1(norm="fp32_math"), "unknown policy key", "did you mean 'norms'?"),
    (parse("O1,bf1"), "'bf1' is neither a dtype nor key=value", "did you mean 'bf16'?"),
    (parse("O1,low=sofmax"), "unknown op 'sofmax'", "did you mean 'softmax'?"),
    (parse("O1,lists=portabel"), "unknown lists 'portabel'", "did you mean 'portable'?"),
    (lambda: Policy.O1(lists="portabel"), both("lists=portable")),
    (parse("O3,keep_batchnorm_fp32=maybe"), "unknown keep_batchnorm_fp32 'maybe'", "valid: true, false"),
    (lambda: Policy.O3(keep_batchnorm_fp32=1), "unknown keep_batchnorm_fp32 '1'", "valid: true, false"),
    (lambda: Policy.O2(level="O9"), "unknown level 'O9'", "valid: O0, O1, O2, O3"),
    (lambda: Rule("fp23", op="exp"), "unknown treatment 'fp23'", "did you mean 'fp32'?"),
    (lambda: Rule("bf16", module="head"), "unknown treatment 'bf16'", "valid: low, fp32", "the text fp32_module=head"),
    # Texts
    (parse("fp8"), "unknown level 'fp8'", 'write  Policy.O1().fp8("linear"), the text O1,fp8=linear'),
    (parse("nvfp4_module"), "nvfp4_module takes a value", "the text O1,nvfp4_module=head"),
    (parse("runs/mine.policy"), "unknown level 'runs/mine.policy'", "write  Policy.load(path)"),
    (parse(""), "there is no level", "valid: O0, O1, O2, O3"),
    (parse(None), "a policy's text is not None"),
    (parse("o2 BF16"), "unknown level 'o2 BF16'", 'Policy.O2("BF16"), the text O2,dtype=BF16'),
    (parse("bf17"), "unknown level 'bf17'", "valid: O0, O1", 'write  Policy.O1("bfloat16"), the text O1,dtype=bfl'),
    (parse("17-mixed"), "unknown level '17-mixed'", 'write  Policy.O1("float16"), the text O1,dtype=float16'),
    (parse("bf16-tru"), "unknown level 'bf16-tru'", 'write  Policy.O3("bfloat16")'),
    (parse("flaot16"), "unknown level 'flaot16'", 'write  Policy.O1("float16")'),
    (parse("64"), "unknown level '64'"),
    (parse("bf16,O2"), "the level O2 does not stand first", "the text O2,dtype=bfloat16"),
    (parse("bf16,o0"), "the level O0 does not stand first", "write  Policy.O0(), the text O0"),
    (parse("bf16-mixed,dtype=fp16"), "the key 'dtype' stands twice", "the text dtype=bfloat16"),
    (parse("bf16,low=sofmax"), "unknown op 'sofmax'"),
    (parse("dtype=bf16,O2"), "the level O2 does not stand first", "the text O2,dtype=bfloat16"),
    (parse("dtype=bf17"), "unknown dtype 'bf17'"),
    (lambda: Policy.of(torch.float64), "a policy cannot be made from torch.float64", "the text O1,bf16"),
    (lambda: Policy.of(torch.int8), "a policy cannot be made from torch.int8"),
    (parse("O1,opt_level=o3,bf16"), "unknown policy key 'opt_level'", "write  the policy without opt_level=o3"),
    (parse("O1,fp16,O2"), "the level O2 does not stand first", "the text O2,dtype=bfloat16"),
    (parse("O1,,bf16"), "nothing between two commas", "the text dtype=bfloat16"),
    (parse("O1,fp32_module=a b"), "the module glob 'a b' cannot be written", "=head+blocks.*"),
    (parse("O1,lists=device,lists=portable"), "the key 'lists' stands twice"),
    (parse("O1,bf16,dtype=float16"), "the key 'dtype' stands twice"),
    (parse("O1,loss_scale=dynamic(init=1024,low=exp"), "a bracket is not closed", "init=1024)"),
    (lambda: Policy.O1(loss_scale="dynamic(init=1024"), "unknown loss scale", "a bracket is not closed"),
    (lambda: Policy.O1(loss_scale=1e99), "init is 1e+99", "to 3.4e38\n  write  2**16"),
    (parse("O1,dtype=int8,lists=x,low,low=exp,fp32_module="), "4 problems", "unknown dtype 'int8'",
     "unknown lists 'x'", "'low' is not key=value", "'fp32_module=' is not"),
    # Rules
    (lambda: Rule("low"), "must match something"),
    (lambda: Rule("low", op=""), "must match something"),
    (lambda: Rule("low", param="*.scale", module="head"), "also names an op or a module"),
    (lambda: Rule("ban", param="*.scale"), "a parameter cannot be treated as 'ban'"),
    (lambda: Rule("ban", module="head"), both("ban=*@head")),
    *((lambda name=name: parse_rules("low_module", name), "cannot be written in a policy's text",
       f"or for the one of this name {both(f'low_module={exact(name)}')}")
      for name in ("a,b", "a(b", "a#b", "a;b", "a@b")),
    (lambda: Rule("low", op="exp,log"), "cannot be written in a policy's text"),
    (lambda: Rule("low", op=3), "the op glob is 3, not text"),
    (lambda: Rule("low", op="exp", reason=3), "the reason is 3, not text"),
    (parse("O1,fp32=softmax@"), "cannot be written in a policy's text"),
    (parse("O1,low=softmax+exp,fp32=aten::softmax.int"), "is named twice, with different treatments"),
    (lambda: Policy.O1(rules=3), "rules must be a tuple of Rule"),
    *((lambda t=t: getattr(Policy.O1(), t)(), f"{t}() names no op\n  write  {both(f'{t}=softmax')}")
      for t in TREATMENTS if t not in QUANTISED),
    # Less than sixteen bits
    *((lambda t=t: getattr(Policy.O1(), t)(), f"{t}() names nothing\n  write  {both(f'{t}_module=blocks.*')}")
      for t in QUANTISED),
    *((parse(f"O1,bf16,fp8={op}"), f"{op} is not computed in fp8", "recurrent cells and convolutions stay low",
       both("fp8=linear")) for op in ("softmax", "conv2d", "bmm", "lstm", "conv*", "scaled_dot_product_attention")),
    (parse("O1,bf16,mxfp8=gelu@head"), "gelu is not computed in mxfp8", both("mxfp8=linear@head")),
    (parse("O1,bf16,fp8=lienar"), "unknown op 'lienar'", both("fp8=linear")),
    *((parse(f"O0,{rule}"), f"O0 has no {rule.partition('_')[0]} products", both(f"O1,dtype=bfloat16,{rule}"))
      for rule in ("fp8_module=*", "mxfp8_param=*.weight", "nvfp4_module=a")),
    (parse("O1,bf16,fp8=linear,low=linear"), "is named twice, with different treatments"),
    *((parse(f"O1,fp8_history={n}"), "no number of steps from 1 to 100,000", both("fp8_history=1024"))
      for n in ("0", "-1", "1.5", "x", "100001", "1e3")),
    *((lambda n=n: Policy.O1(fp8_history=n), "no number of steps from 1 to 100,000") for n in (True, 16.0, None, "a")),
    (parse("O1,nvfp4_tricks=rht+rht"), "unknown nvfp4_tricks 'rht+rht'"),
    (parse("O1,nvfp4_tricks=hadamard"), "unknown nvfp4_tricks 'hadamard'", "rht+stochastic+2d"),
    (parse("O1,fp8_recipe=blockwise"), "unknown fp8_recipe 'blockwise'", "tensorwise, rowwise, delayed"),
    (parse("O1,low_products=dgrad"), "unknown low_products 'dgrad'", "did you mean 'wgrad'"),
    (parse("O1,bf16,fp8_modules=a"), "unknown policy key 'fp8_modules'", both("fp8_module=a")),
    # Words of other libraries
    *((parse(f"O2,bf16,{key}=false"), f"unknown policy key '{key}'", "valid: dtype", f"the policy without {key}=false")
      for key in ("master_weights", "autocast", "half")),
    # Python's words
    (lambda: Policy.O1(fp32_module="head"), both("fp32_module=head")),
    (lambda: Policy.O1(keep_fp32=["a", "b"]), both("fp32_module=a+b")),
    (lambda: Policy.O1(low=["softmax"]), both("low=softmax")),
    (lambda: Policy.O2().evolve(lossscale=8.0), both("loss_scale=8.0")),
]  # fmt: skip


def test_what_is_refused_and_what_to_write():
    for make, *words in ROWS:
        with refused(PolicyError, *words):
            make()


def test_no_word_is_suggested_for_what_is_no_misspelt_one():
    for make in (
        lambda: Policy.O1(torch.float64),
        *map(parse, ("O1,reduce=fp32", "O1,reduce_dtype=fp32", "O1,accumulate=native", "O1,flurb=3")),
    ):
        with pytest.raises(PolicyError, match="unknown") as caught:
            make()
        assert "did you mean" not in str(caught.value)
        assert "policy.evolve" not in str(caught.value)


#: Misspelt words, and what is meant.
MEANT = """
    keep_fp32=head fp32_module=head; keep_fp32=head+blocks.*.norm fp32_module=head+blocks.*.norm;
    fp32_modules=head fp32_module=head; fp32_params=*.scale fp32_param=*.scale; dtyp=bf16 dtype=bf16;
    FP32_modul=head fp32_module=head; loss_scaling=1024 loss_scale=1024; param_dtypes=fp32 param_dtype=fp32;
    fp32=head fp32_module=head; low=head low_module=head; low=sofmax low=softmax; ban_module=head ban=*@head;
    promote_module=head promote=*@head; native_module=head native=*@head; fp32_math_module=head fp32_math=*@head;
    ban_param=head.weight fp32_param=head.weight; emulated=yes emulate=auto
"""


def test_another_word_is_answered_with_the_one_that_is_meant():
    """In both spellings, and what is answered is taken."""
    for pair in MEANT.split(";"):
        entry, meant = pair.split()
        with pytest.raises(PolicyError) as caught:
            Policy.parse(f"O1,{entry}")
        assert f"the text {meant}" in str(caught.value), entry
        Policy.parse(f"O2,{meant}")


# Both spellings -----------------------------------------------------------------------------------------

NAMES = {"Policy": Policy, "Rule": Rule, "policy": Policy.O2("bfloat16").low("tanh")}
SPELLED = [
    ("O1,bf16", 'Policy.O1("bf16")'),
    ("O0", "Policy.O0()"),
    ("O3,dtype=float16,keep_batchnorm_fp32=true,output_dtype=none",
     'Policy.O3("float16", keep_batchnorm_fp32=True, output_dtype=None)'),
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
]  # fmt: skip


def test_both_spellings_mean_one_policy():
    for text, python in SPELLED:
        assert both(text) == f"{python}, the text {text}"
        # What is no whole policy a user adds to one.
        whole = text if text.startswith("O") else f"O2,dtype=bfloat16,{text},low=tanh"
        assert eval(python, NAMES) == Policy.parse(whole)


WRONG = [
    "bf17", "fp8", "tf32", "dtype", "loss_scale", "low", "fp32_module=", "low_param=", "emulate=on",
    "dtype==bf16", "dtyp=bf16", "lists=devices", "fp32_modul=head", "FP32_MODULE=head",
    "low=softmaxx", "fp32=exp_", "ban_module=head", "native_param=x", "fp32_module=a b",
    "fp32=nn.Sequential", "O3", ",lists=device", "loss_scale=dynamic(init=8",
    "keep_fp32=head", "low=exp,fp32=exp", "param_dtype=bf16",
]  # fmt: skip


def test_the_text_of_a_cure_is_one_and_so_is_its_python():
    for entry in WRONG:
        with pytest.raises(PolicyError, match="  write  ") as caught:
            Policy.parse(f"O2,fp16,{entry}")
        cures = re.findall(r"([\w.]+\(.*\)|dtype=\S+), the text (\S+[^\s;,])", str(caught.value))
        assert cures, entry
        for python, text in cures:
            begin = "" if text.startswith("O") else "O2," if text.startswith("dtype") else "O2,bf16,low=tanh,"
            policy = Policy.parse(begin + text)
            if python.startswith("policy"):
                made = eval(python, NAMES)
                assert set(made.rules) == set(policy.rules), entry
                assert made.evolve(rules=()) == policy.evolve(rules=()), entry


# Files --------------------------------------------------------------------------------------------------

FILES = [
    ("O1\ndtpye=float16", "line 2: unknown policy key 'dtpye'", "mine.policy", "did you mean 'dtype'?"),
    ("# mine\n\nO9", "line 3: unknown level 'O9'", "valid: O0, O1, O2, O3"),
    ("O1\nlow=exp\nkeep_fp32=head  # why\nfp32=sofmax\ndtype",
     "3 problems", "1. line 3: unknown policy key 'keep_fp32'",
     "the text fp32_module=head", "2. line 4: unknown op 'sofmax'", "3. line 5: 'dtype' is not key=value"),
    ("O1\nloss_scale=dynamic(init=8\nlists=x", "line 2: a bracket is not closed", "line 3: unknown lists 'x'"),
    ("O1\nlow=exp\nban_module=head", "line 3: a module cannot be treated as 'ban'", "the text ban=*@head"),
    ("O0\ndtype=float16", "mine.policy", "O0 cannot compute in float16"),
    ("", "mine.policy", "there is no level"),
    ('version = 1\nlevel = "O2"\n\n[[rules]]\ntreatment = "fp32"\nmodule = "head"',
     "mine.policy' is TOML", "one entry a line", "write  O2\n         dtype=bfloat16\n"),
    ("O1\n" + "(" * 90_000, "line 2: a bracket is not closed"),
    ("x" * 1_000_001, "more than 1,000,000 bytes"),
    ("O1\n" + "\n".join(f"a{n}=1" for n in range(20_000)), "line 21: unknown policy key 'a19'"),
    ("O1\nloss_scale=" + "9" * 400, "line 2: init is inf"),
    ("x" * 100_000, "unknown level"),
    ("O1\n" + "low=exp\n" * 20_000, "is too long"),
    (b"\xff", "mine.policy' is not a policy file"),
]  # fmt: skip


def test_wrong_policy_files_say_which_lines_are_wrong(tmp_path):
    path = tmp_path / "mine.policy"
    for text, *words in FILES:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(PolicyError) as caught:
            Policy.load(path)
        assert all(word in str(caught.value) for word in words), str(caught.value)[:1000]
        assert len(str(caught.value)) < 10_000


def test_policies_are_read_from_and_written_to_regular_files(tmp_path):
    os.mkfifo(tmp_path / "pipe.policy")
    (tmp_path / "folder.policy").mkdir()
    for call, words in (
        (lambda: Policy.load(tmp_path / "pipe.policy"), "this is a pipe"),
        (lambda: Policy.O1().save(tmp_path / "pipe.policy"), "this is a pipe"),
        (lambda: Policy.O1().save(tmp_path / "folder.policy"), "cannot be written to"),
        (
            lambda: Policy.O1(rules=[Rule("fp32", op="exp", reason="a" * 1_000_000)]).save(tmp_path / "long"),
            "at most 1,",
        ),
        (lambda: Policy.load("a\0.policy"), "embedded null"),
    ):
        with refused(PolicyError, words):
            call()
    assert sorted(os.listdir(tmp_path)) == ["folder.policy", "pipe.policy"]
    Policy.O1(rules=[Rule("fp32", op="exp", reason="a\ud800\x1b[31m")]).save(tmp_path / "half.policy")
    assert (tmp_path / "half.policy").read_text().endswith("fp32=exp   # a\\ud800\\x1b[31m\n")


# Whatever strangers send --------------------------------------------------------------------------------


def answered(make):
    """Call what may work, or raise a short PolicyError that a terminal can show; nothing else."""
    try:
        make()
    except PolicyError as error:
        text = str(error)
        assert len(text) < 10_000
        assert all(line.isprintable() for line in text.replace("\xa0", " ").split("\n"))


ODD = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.binary(max_size=4),
        st.just(0).map(lambda _: 10**5000),
        st.sampled_from([10**400, -(10**400), 2**63, 1j, ..., "dynamic", "O1", np.float32(2), np.int64(3)]),
        st.sampled_from([np.array([1, 2]), torch.ones(2), torch.float16]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.tuples(inner), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=5,
)  # fmt: skip


FIELD_NAMES = st.sampled_from([field.name for field in dataclasses.fields(Policy)])


@settings(max_examples=60)
@given(st.dictionaries(FIELD_NAMES, ODD, min_size=1, max_size=3), ODD, ODD)
def test_odd_values_are_refused(fields, one, other):
    answered(lambda: Policy.O2().evolve(**fields))
    answered(lambda: Policy.of(one))
    answered(lambda: Rule(one, op=other))
    answered(lambda: Rule("fp32", module=one, reason=other))
    answered(lambda: Policy.O1().low(one))
    answered(lambda: Policy.O1().explain(one))


WORDS = [
    "O1", "O2", ",", "\n", "\r\n", "#", "=", "+", "@", "dtype", "bf16", "fp32", "low", "softmax", "fp32_module", "head",
    "(", ")", "loss_scale", "dynamic", "9" * 500, "master_weights", "keep_fp32", "autocast", "true", "\x00", "…",
]  # fmt: skip


@settings(max_examples=60)
@given(st.text(alphabet="O12,=+.*?[]()@;_ abcdefhlmnoprstwx\"'\\\n\x1b", max_size=60),
       st.one_of(st.binary(max_size=60), st.lists(st.sampled_from(WORDS), max_size=25).map("".join)))  # fmt: skip
def test_odd_texts_and_files_are_refused(tmp_path_factory, text, content):
    for given_text in (text, f"O1,{text}"):
        answered(lambda: Policy.parse(given_text))  # noqa: B023
    answered(lambda: LossScale.parse(f"dynamic({text})"))
    path = tmp_path_factory.getbasetemp() / "odd.policy"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    answered(lambda: Policy.load(path))


def test_long_texts_are_refused_in_few_words():
    for text in (
        "O1,dtype=" + "x" * 90_000, "O1," + "a," * 45_000, "O1," + "a=b," * 22_000, "O1," + "dtype=bfloat16," * 6_000,
        "O1," + "low=softmax,fp32=softmax," * 3_500, "O1,low=" + "+".join(f"*a*b*c{n}" for n in range(20_000)),
        "(" * 90_000, "x" * 1_000_000, "O1,loss_scale=dynamic(" + "init=1," * 12_000 + ")",
    ):  # fmt: skip
        with pytest.raises(PolicyError) as caught:
            Policy.parse(text)
        assert len(str(caught.value)) < 10_000, text[:20]


def test_a_policy_has_no_more_rules_than_its_text_can_hold():
    policy = Policy.O1().keep_fp32(modules=[f"blocks.{n}.attention.projection" for n in range(2_500)])
    assert Policy.parse(str(policy)) == policy
    with pytest.raises(PolicyError, match=r"5,000 rules are too many\n  why    their text has [0-9,]+ characters"):
        Policy.O1().keep_fp32(modules=[f"blocks.{n}.attention.projection" for n in range(5_000)])
