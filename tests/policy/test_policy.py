"""Policy as a value: levels, overrides, text, files, rules, and what it decides."""

import copy
import pickle
import string

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mezzo import LossScale, Policy, PolicyError, Rule
from mezzo.policy.ops import OPS, QUANTISABLE, QUANTISED, TREATMENTS

# What a level means, written down a second time: weights, casts, batch norm fp32, halves, scale (fp16, bf16).
LEVEL_TABLE = {
    "O0": (torch.float32, False, True, False, ("none", "none")),
    "O1": (torch.float32, True, True, False, ("dynamic", "none")),
    "O2": (torch.float32, True, True, True, ("dynamic", "none")),
    "O3": ("low", False, False, False, ("constant", "none")),
}


@pytest.mark.parametrize("level", LEVEL_TABLE)
def test_levels_are_those_of_the_table(level):
    weights, casts, batchnorm, halves, scales = LEVEL_TABLE[level]
    for number, dtype in enumerate((torch.float16, torch.bfloat16)):
        policy = Policy.O0() if level == "O0" else getattr(Policy, level)(dtype)
        assert policy.level == level
        assert policy.dtype == (torch.float32 if level == "O0" else dtype)
        assert policy.param_dtype == (dtype if weights == "low" else weights)
        assert policy.output_dtype == (torch.float32 if weights == "low" else None)
        assert (policy.casts, policy.keep_batchnorm_fp32, policy.halves) == (casts, batchnorm, halves)
        assert policy.loss_scale.mode == scales[number]
        assert (policy.lists, policy.norms, policy.emulate, policy.rules) == ("portable", "fp32", "auto", ())


def test_defaults_and_what_a_level_alone_says():
    assert Policy.O3().loss_scale == LossScale.constant(1.0)
    assert Policy.O1().dtype == Policy.O2().dtype == Policy.O3().dtype == torch.float16
    for made in (Policy.O1("bf16", param_dtype="fp32"), Policy.O2("bf16", param_dtype="fp32")):
        assert made == Policy.parse(f"{made.level},bf16")
    assert Policy.O3("bf16", param_dtype="bf16") == Policy.O3("bf16")
    assert Policy.O2("bf16").evolve(dtype="fp16").param_dtype == torch.float32


def test_o2_is_o1_but_for_where_weights_live():
    for dtype in ("float16", "bfloat16"):
        for change in ({}, {"norms": "fp32_math"}, {"lists": "device"}, {"rules": [Rule("low", op="softmax")]}):
            one, two = Policy.O1(dtype, **change), Policy.O2(dtype, **change)
            assert two.differences(one) == ("level: O2 → O1",)
            for op in (*OPS, "exp_", "torch.randn"):
                for device in (None, "cpu", "cuda"):
                    assert two.explain(op, device_type=device) == one.explain(op, device_type=device)
            assert one.storage("a.weight", "a") == (torch.float32, None)
            assert two.storage("a.weight", "a") == (two.dtype, None)


def test_every_property_of_a_level_can_be_overridden():
    for name, value, expected in (
        ("output_dtype", "float32", torch.float32),
        ("output_dtype", "bfloat16", torch.bfloat16),
        ("output_dtype", None, None),
        ("keep_batchnorm_fp32", False, False),
        ("loss_scale", 1024, LossScale.constant(1024)),
        ("loss_scale", "dynamic", LossScale.dynamic()),
        ("loss_scale", None, LossScale.none()),
        ("lists", "device", "device"),
        ("norms", "fp32_math", "fp32_math"),
        ("emulate", True, True),
    ):
        assert getattr(Policy.O2(**{name: value}), name) == expected, name
        assert getattr(Policy.O2().evolve(**{name: value}), name) == expected, name


def test_policies_are_values():
    one, two = Policy.parse("O1,low=exp"), Policy.O1().low("exp")
    assert one == two == pickle.loads(pickle.dumps(one)) == copy.deepcopy(one)
    assert hash(one) == hash(two)
    assert Rule("low", op="exp", reason="measured") == Rule("low", op="exp")
    with pytest.raises(AttributeError):
        one.level = "O2"


def test_differences_name_each_field():
    lines = Policy.O1().differences(Policy.O2("bfloat16").low("exp"))
    assert {"level: O1 → O2", "dtype: float16 → bfloat16", "rules: no rules → low=exp"} <= set(lines)
    assert Policy.O1().differences(Policy.O1()) == ()


# Rules --------------------------------------------------------------------------------------------------


def test_builders_put_their_rule_first_and_return_new_policies():
    policy = Policy.O1()
    made = policy.low("softmax", "exp").fp32("torch.softmax")
    assert policy.rules == ()
    assert made.explain("softmax").treatment == "fp32"
    assert str(made) == "O1,dtype=float16,fp32=torch.softmax,low=exp"  # the older rule could never win again
    for treatment in TREATMENTS:
        ops = ("mm", "linear") if treatment in QUANTISED else ("gelu", "tanh")
        made = getattr(policy, treatment)(*ops)
        assert made.explain(ops[0]).treatment == made.explain(f"torch.{ops[1]}").treatment == treatment
        assert str(made) == f"O1,dtype=float16,{treatment}={'+'.join(ops)}"
    kept = policy.keep_fp32(modules="head", params=["a", "b"])
    assert kept == policy.keep_fp32(modules=["head"], params=["a", "b"])
    assert str(kept) == "O1,dtype=float16,fp32_module=head,fp32_param=a+b"


def test_products_of_weights_take_less_than_sixteen_bits_and_nothing_else_does():
    for treatment in QUANTISED:
        policy = getattr(Policy.O2("bfloat16"), treatment)("mm", modules=["blocks.*", "head"], params="tail.weight")
        assert str(policy) == (
            f"O2,dtype=bfloat16,{treatment}=mm,{treatment}_module=blocks.*+head,{treatment}_param=tail.weight"
        )
        for op in OPS:
            inside, outside = policy.explain(op, "blocks.0.up"), policy.explain(op, "embed")
            assert (inside.treatment == treatment) == (op in QUANTISABLE)
            assert (outside.treatment == treatment) == (op == "mm")
        # It says nothing of what is stored, nor of the module as a whole.
        assert policy.module_rule("blocks.0") is None
        assert policy.storage("tail.weight", "tail") == (torch.bfloat16, None)
        assert policy.product_rule("tail.weight") == Rule(treatment, param="tail.weight")
        assert policy.keep_fp32(params="tail.*").product_rule("tail.weight") is None
        assert Rule(treatment, module="a") == Rule(treatment, op="*", module="a")
        assert {*Rule(treatment, op="*").ops} == {*QUANTISABLE}
    policy = Policy.O1(nvfp4_tricks="2d+rht")
    assert policy == Policy.O1(nvfp4_tricks="rht+2d") != Policy.O1()
    assert str(policy) == "O1,dtype=float16,nvfp4_tricks=rht+2d"


def test_explain_gives_rule_reason_and_source():
    policy = Policy.O1().keep_fp32(modules=["head"])
    inside, outside, without = (
        policy.explain("linear", "head.fc"), policy.explain("linear", "body.fc"), Policy.O3().explain("linear"),
    )  # fmt: skip
    assert (inside.treatment, inside.rule, inside.source) == ("fp32", Rule("fp32", module="head"), "policy")
    assert "fp32_module=head" in inside.reason
    assert (outside.treatment, outside.rule, outside.reason, outside.source) == ("low", None, "gemm", "op table")
    assert (without.treatment, without.reason, without.source) == ("native", "O3 casts no op", "level O3")
    policy = Policy.O1(rules=[Rule("low", op="softmax", module="attn*")])  # both must match
    for op, module, treatment in (("softmax", "attn.0", "low"), ("softmax", "mlp", "fp32"), ("exp", "attn.0", "fp32"),
                                  ("softmax", None, "fp32")):  # fmt: skip
        assert policy.explain(op, module).treatment == treatment
    assert Policy.O1().fp32("conv*").explain("conv2d").treatment == "fp32"
    # What is stored is the level's matter, unless a rule names the parameter.
    head = Rule("low", module="head")
    for policy, dtype, rule in (
        (Policy.O1("bf16", rules=[head]), torch.float32, None),
        (Policy.O2("fp16", rules=[head]), torch.float16, head),
        (Policy.O2("bf16").keep_fp32(modules=["head"]), torch.float32, Rule("fp32", module="head")),
        (Policy.O3("bf16", rules=[head]), torch.bfloat16, head),
        *((make("bf16", rules=[Rule("low", param="head.*")]), torch.bfloat16, Rule("low", param="head.*"))
          for make in (Policy.O1, Policy.O2, Policy.O3)),
        *((make("bf16").keep_fp32(params="head.*"), torch.float32, Rule("fp32", param="head.*"))
          for make in (Policy.O1, Policy.O2, Policy.O3)),
        (Policy.O0(), torch.float32, None),
        (Policy.O3("bf16"), torch.bfloat16, None),
    ):  # fmt: skip
        assert policy.storage("head.weight", "head") == (dtype, rule)
    for policy, dtype in ((Policy.O2("bf16"), torch.float32), (Policy.O3("bf16"), torch.bfloat16),
                          (Policy.O3("bf16", keep_batchnorm_fp32=True), torch.float32)):  # fmt: skip
        assert policy.storage("norm.weight", "norm", is_norm=True) == (dtype, None)


def test_the_source_is_who_decided_and_not_whose_lists_name_the_op():
    """Every list names softmax, and none of them was asked."""
    assert "apex float list" in OPS["softmax"].source
    for change, source in (
        ({}, "op table"),
        ({"norms": "fp32_math"}, "norms=fp32_math"),
        ({"lists": "device"}, "lists=device"),
        ({"rules": [Rule("low", op="softmax")]}, "policy"),
    ):
        assert Policy.O1(**change).explain("softmax").source == source
    assert Policy.O1().explain("fft_rfft", device_type="cuda").source == "torch"
    assert Policy.O1().explain("zero_").source == "torch"
    assert Policy.O1().explain("torch.randn").source == "op table"


# Text ---------------------------------------------------------------------------------------------------


def test_canonical_text_round_trips():
    for text in (
        "O0",
        "O1,dtype=bfloat16",
        "O1,dtype=bfloat16,low=softmax+gelu,fp32_module=head.*",
        "O2,dtype=float16,loss_scale=constant(1024),fp32_param=*.scale",
        "O2,dtype=bfloat16,output_dtype=float32,low=a::b,fp32=exp+log,low=tanh",
        "O3,dtype=bfloat16,output_dtype=none,keep_batchnorm_fp32=true",
        "O1,dtype=float16,norms=fp32_math,emulate=false,fp32=softmax@blocks.*.attn",
        "O2,dtype=bfloat16,fp8_module=blocks.*",
        "O1,dtype=bfloat16,fp8_recipe=delayed,fp8_history=16,fp8_amax=latest,fp8=linear@a,fp8_module=b,fp8_param=*.w",
        "O1,dtype=float16,low_products=wgrad,nvfp4_tricks=rht+2d,mxfp8=mm,nvfp4_module=*",
    ):
        assert str(Policy.parse(text)) == text
    assert Policy.parse(" O1 , dtype = bfloat16 ") == Policy.O1("bfloat16")
    assert Policy.parse("O2,loss_scale=1024") == Policy.O2(loss_scale=1024)
    policy = Policy.parse("O2,dtype=float16,loss_scale=128.0,norms=fp32_math,low=gelu")
    assert policy.region_text() == "O2,dtype=float16,norms=fp32_math,low=gelu"
    assert Policy.parse(policy.region_text()) == policy.evolve(loss_scale="dynamic")


globs = st.text(string.ascii_lowercase + ".*_", min_size=1, max_size=8).filter(str.strip)
op_rules = st.builds(
    lambda treatment, op, module: Rule(treatment, op=op, module=module),
    st.sampled_from([treatment for treatment in TREATMENTS if treatment not in QUANTISED]),
    st.sampled_from(sorted(OPS)) | st.just("conv*"), st.none() | globs,
)  # fmt: skip
product_rules = st.builds(
    lambda treatment, op, module: Rule(treatment, op=op, module=module),
    st.sampled_from(QUANTISED), st.sampled_from(QUANTISABLE) | st.just("*"), st.none() | globs,
)  # fmt: skip
op_rules |= product_rules
placed = st.sampled_from(["low", "fp32", *QUANTISED])
module_rules = st.builds(lambda treatment, glob: Rule(treatment, module=glob), placed, globs)
param_rules = st.builds(lambda treatment, glob: Rule(treatment, param=glob), placed, globs)
FIELDS = {
    "output_dtype": st.sampled_from([None, "float32", "bfloat16"]),
    "lists": st.sampled_from(["portable", "device"]),
    "norms": st.sampled_from(["fp32", "fp32_math"]),
    "emulate": st.sampled_from(["auto", True, False]),
    "fp8_recipe": st.sampled_from(["tensorwise", "rowwise", "delayed"]),
    "fp8_history": st.integers(1, 2000),
    "fp8_amax": st.sampled_from(["max", "latest"]),
    "low_products": st.sampled_from(["none", "wgrad", "forward"]),
    "nvfp4_tricks": st.permutations(["rht", "stochastic", "2d"]).map("+".join) | st.sampled_from(["none", "2d+rht"]),
}


@given(
    level=st.sampled_from(["O1", "O2", "O3"]),
    dtype=st.sampled_from(["float16", "bfloat16"]),
    fields=st.fixed_dictionaries({}, optional=FIELDS),
    rules=st.lists(op_rules | module_rules | param_rules, max_size=5, unique_by=lambda rule: rule.selector),
)
def test_any_policy_round_trips_through_its_text(level, dtype, fields, rules):
    policy = getattr(Policy, level)(dtype, rules=tuple(rules), **fields)
    assert Policy.parse(str(policy)) == policy


def test_a_word_for_a_dtype_stands_wherever_one_does():
    for word, dtype in (("bf16", torch.bfloat16), ("BF16", torch.bfloat16), ("torch.bfloat16", torch.bfloat16),
                        ("fp16", torch.float16), ("half", torch.float16), ("Float16", torch.float16)):  # fmt: skip
        for level in ("O1", "O2", "O3"):
            make = getattr(Policy, level)
            assert make(word) == make(dtype) == Policy.parse(f"{level},{word}") == Policy.parse(f"{level},dtype={word}")
            assert Policy.parse(f"{level},{word},fp32=softmax") == make(dtype).fp32("softmax")
            assert Policy.parse(f"{level},{word},output_dtype={word}") == make(dtype, output_dtype=word)
            assert make(word, output_dtype=word).output_dtype == dtype
        assert Policy.parse(f"O3,{word},param_dtype={word}") == Policy.O3(dtype)


WORDS_THAT_BEGIN = [
    (("bf16", "BF16", "bfloat16", "torch.bfloat16", "bf16-mixed", "Bf16-Mixed"), Policy.O1(torch.bfloat16)),
    (("fp16", "half", "float16", "FP16", "16", "16-mixed"), Policy.O1(torch.float16)),
    (("bf16-true",), Policy.O3(torch.bfloat16)),
    (("16-true",), Policy.O3(torch.float16)),
    (("fp32", "float", "torch.float32", "32", "32-true", "o0", "O0"), Policy.O0()),
    (("o1", "O1"), Policy.O1()),
    (("o2", "O2"), Policy.O2()),
    (("o3", "O3"), Policy.O3()),
]


def test_where_no_level_stands_it_is_o1():
    assert Policy.of("dtype=bf16") == Policy.O1("bf16")
    assert Policy.of("low=gelu") == Policy.of("O1,low=gelu") == Policy.O1().low("gelu")
    assert Policy.of("fp32_module=head,bf16") == Policy.O1("bf16").keep_fp32(modules=["head"])


@pytest.mark.parametrize("words, policy", WORDS_THAT_BEGIN)
def test_words_that_people_type_for_a_policy(words, policy, tmp_path, monkeypatch):
    """Also where a file of that name lies in the folder: a policy's text is one."""
    monkeypatch.chdir(tmp_path)
    for word in words:
        Policy.O2("bf16").low("exp").save(word)
        assert Policy.of(word) == Policy.parse(f" {word} ") == Policy.parse(str(policy)) == policy, word
        if policy.casts:
            assert Policy.parse(f"{word},fp32=softmax") == policy.fp32("softmax")
        with pytest.raises(PolicyError, match="unknown policy key 'fp32_modul'"):
            Policy.of(f"{word},fp32_modul=actor.policy")
    assert Policy.of(policy.dtype).dtype == policy.dtype


def test_a_dtype_is_o1_in_it():
    assert Policy.of(torch.bfloat16) == Policy.O1("bfloat16")
    assert Policy.of(torch.float16) == Policy.O1("float16")
    assert Policy.of(torch.float32) == Policy.O0()
    assert Policy.O1(level="o2") == Policy.O2()


# Files --------------------------------------------------------------------------------------------------


def test_a_file_is_the_text_one_entry_a_line_with_the_reasons(tmp_path):
    reasoned = (Rule("low", op="exp", reason='range # "checked"\n2026 – ok'), Rule("fp32", param="*.g"))
    policy = Policy.O2("bfloat16", output_dtype="float32", loss_scale=8, rules=reasoned)
    policy.save(tmp_path / "mine.policy")
    _, *lines = (tmp_path / "mine.policy").read_text().splitlines()
    assert lines == [
        "O2", "dtype=bfloat16", "output_dtype=float32", "loss_scale=constant(8)",
        'low=exp   # range # "checked" 2026 – ok', "fp32_param=*.g",
    ]  # fmt: skip
    loaded = Policy.load(tmp_path / "mine.policy")
    assert loaded == policy == Policy.of(str(tmp_path / "mine.policy")) == Policy.of(tmp_path / "mine.policy")
    assert [rule.reason for rule in loaded.rules] == ['range # "checked" 2026 – ok', ""]
    assert [path.name for path in tmp_path.iterdir()] == ["mine.policy"]


def test_a_file_may_be_written_by_hand(tmp_path):
    path = tmp_path / "mine.policy"
    path.write_bytes(b"\xef\xbb\xbf# mine\r\n\r\nO1, bf16,   # as every day\r\n  lists = device\r\n"
                     b"fp32_module = head + tail  # the logits overflow\r\n#low=exp\r\nlow=softmax@attn")  # fmt: skip
    policy = Policy.load(path)
    assert str(policy) == "O1,dtype=bfloat16,lists=device,fp32_module=head+tail,low=softmax@attn"
    assert [rule.reason for rule in policy.rules] == ["the logits overflow", "the logits overflow", ""]
    assert Policy.parse(path.read_text("utf-8-sig")) == policy, "a text may have lines, too"


def test_a_policy_file_may_have_any_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    policy = Policy.O2("bfloat16").low("exp")
    for name in ("mine.txt", "O1", "O9"):
        policy.save(name)
    assert Policy.of("mine.txt") == Policy.of("O9") == policy
    assert Policy.of("O1") == Policy.O1(), "a policy's text is one, whatever lies beside it"
    assert Policy.of("O1,fp32_module=actor.policy") == Policy.O1().keep_fp32(modules=["actor.policy"])
    (tmp_path / "notes.txt").write_text("my notes")
    for wrong, says in (
        ("notes.txt", r"policy file 'notes\.txt': line 1: unknown level 'my notes'"),
        ("nothing.txt", "unknown level"),
        (str(tmp_path), "this is a folder"),
        ("O1,fp32_modul=actor.policy", "unknown policy key 'fp32_modul'"),
        (str(tmp_path / "nowhere.policy"), r"there is no policy file .*nowhere\.policy'\n  write  .*mezzo tune"),
        (3, "a policy cannot be made from int"),
    ):
        with pytest.raises(PolicyError, match=says):
            Policy.of(wrong)
