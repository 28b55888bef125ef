"""Policy as a value: levels, overrides, text, files, rules, and what it refuses."""

import copy
import pickle
import string

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mezzo import LossScale, Policy, PolicyError, Rule
from mezzo.policy.ops import OPS, TREATMENTS

# What a level means, written down a second time: weights, autocast, batch norm fp32, masters, scale (fp16, bf16).
LEVEL_TABLE = {
    "O0": (torch.float32, False, True, False, ("none", "none")),
    "O1": (torch.float32, True, True, False, ("dynamic", "none")),
    "O2": ("low", False, True, True, ("dynamic", "none")),
    "O3": ("low", False, False, False, ("constant", "none")),
}


@pytest.mark.parametrize("level", LEVEL_TABLE)
@pytest.mark.parametrize("number, dtype", [(0, torch.float16), (1, torch.bfloat16)])
def test_levels_are_those_of_the_table(level, number, dtype):
    weights, autocast, batchnorm, masters, scales = LEVEL_TABLE[level]
    policy = Policy.O0() if level == "O0" else getattr(Policy, level)(dtype)
    assert policy.level == level
    assert policy.dtype == (torch.float32 if level == "O0" else dtype)
    assert policy.param_dtype == (dtype if weights == "low" else weights)
    assert policy.output_dtype == (torch.float32 if weights == "low" else None)
    assert policy.autocast is autocast
    assert policy.keep_batchnorm_fp32 is batchnorm
    assert policy.master_weights is masters
    assert policy.loss_scale.mode == scales[number]
    assert (policy.lists, policy.norms, policy.emulate, policy.rules) == ("portable", "fp32", "auto", ())


def test_o3_in_fp16_has_a_constant_scale_of_one():
    assert Policy.O3().loss_scale == LossScale.constant(1.0)


def test_default_dtype_is_float16():
    assert Policy.O1().dtype == Policy.O2().dtype == Policy.O3().dtype == torch.float16


@pytest.mark.parametrize(
    "override, expected",
    [
        ({"autocast": True}, True),
        ({"output_dtype": "bfloat16"}, torch.bfloat16),
        ({"output_dtype": None}, None),
        ({"keep_batchnorm_fp32": False}, False),
        ({"loss_scale": 1024}, LossScale.constant(1024)),
        ({"loss_scale": "dynamic"}, LossScale.dynamic()),
        ({"loss_scale": None}, LossScale.none()),
        ({"lists": "device"}, "device"),
        ({"norms": "fp32_math"}, "fp32_math"),
        ({"emulate": True}, True),
    ],
)
def test_every_property_of_a_level_can_be_overridden(override, expected):
    (name,) = override
    assert getattr(Policy.O2(**override), name) == expected


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: Policy.O0(dtype="float16"), "O0 cannot compute in float16"),
        (lambda: Policy.O1("float32"), "O1 cannot compute in float32"),
        (lambda: Policy.O0(autocast=True), "cannot autocast"),
        (lambda: Policy.O1(autocast=False), "no autocast has nothing in float16"),
        (
            lambda: Policy.O2(param_dtype="bfloat16"),
            "weights cannot be bfloat16 while ops compute in float16",
        ),
        (lambda: Policy.O1(keep_batchnorm_fp32=False), "has no effect on float32 weights"),
        (lambda: Policy.O3(loss_scale=128.0), "fp16 gradients cannot be unscaled in fp16"),
    ],
)
def test_impossible_combinations_are_refused_with_the_reason(make, says):
    with pytest.raises(PolicyError, match=says) as caught:
        make()
    assert "\n  why    " in str(caught.value)
    assert "\n  write  " in str(caught.value)


def test_several_impossible_things_are_reported_together():
    with pytest.raises(PolicyError) as caught:
        Policy.O0(dtype="float16", keep_batchnorm_fp32=False)
    assert str(caught.value).startswith("2 problems\n1. O0 cannot compute in float16")
    assert "2. keep_batchnorm_fp32=false" in str(caught.value)


def test_masters_are_where_weights_are_stored_in_halves():
    assert not any(policy.master_weights for policy in (Policy.O0(), Policy.O1(), Policy.O3()))
    assert Policy.O2().master_weights
    assert Policy.O1("bf16", param_dtype="bf16").master_weights
    assert not Policy.O2("bf16", param_dtype="fp32", autocast=True).master_weights


@pytest.mark.parametrize(
    "make, says, suggests",
    [
        (lambda: Policy.parse("O4"), "unknown level 'O4'", "valid: O0, O1, O2, O3"),
        (lambda: Policy.parse("O1,dtype=flaot16"), "unknown dtype 'flaot16'", "did you mean 'float16'?"),
        (lambda: Policy.parse("O2,dtype=bf1"), "unknown dtype 'bf1'", "the text dtype=bfloat16"),
        (lambda: Policy.O1("bfloat61"), "unknown dtype 'bfloat61'", "did you mean 'bfloat16'?"),
        (lambda: Policy.O1(torch.float64), "unknown dtype 'float64'", "valid: bfloat16, float16, float32"),
        (lambda: Policy.parse("O1,keep_batchnrom_fp32=true"), "unknown policy key", "'keep_batchnorm_fp32'?"),
        (lambda: Policy.O1(norm="fp32_math"), "unknown policy key", "did you mean 'norms'?"),
        (lambda: Policy.parse("O1,fp23=exp"), "unknown policy key 'fp23'", "did you mean 'fp32'?"),
        (lambda: Policy.parse("O1,bf1"), "'bf1' is neither a dtype nor key=value", "did you mean 'bf16'?"),
        (lambda: Policy.parse("O1,low=sofmax"), "unknown op 'sofmax'", "did you mean 'softmax'?"),
        (lambda: Policy.parse("O1,lists=portabel"), "unknown lists 'portabel'", "did you mean 'portable'?"),
        (lambda: Policy.parse("O2,autocast=maybe"), "unknown autocast 'maybe'", "valid: true, false"),
        (lambda: Rule("fp23", op="exp"), "unknown treatment 'fp23'", "did you mean 'fp32'?"),
        (lambda: Policy.O2(autocast=1), "unknown autocast '1'", "valid: true, false"),
        (lambda: Policy.O2(level="O9"), "unknown level 'O9'", "valid: O0, O1, O2, O3"),
        (lambda: Policy.parse("runs/mine.policy"), "unknown level 'runs/mine.policy'", "write  Policy.load(path)"),
        (lambda: Policy.parse(""), "there is no level", "valid: O0, O1, O2, O3"),
        (lambda: Policy.parse("o2"), "unknown level 'o2'", "the text O2,dtype=bfloat16"),
        (lambda: Policy.parse("o2 BF16"), "unknown level 'o2 BF16'", 'Policy.O2("BF16"), the text O2,dtype=BF16'),
        (lambda: Policy.parse("O1,opt_level=o3,bf16"), "unknown policy key 'opt_level'", "the text O3,dtype=float16"),
        (lambda: Policy.parse("O1,fp16,O2"), "the level O2 does not stand first", "the text O2,dtype=bfloat16"),
        (lambda: Policy.parse("O1,,bf16"), "nothing between two commas", "the text dtype=bfloat16"),
        (lambda: Policy.parse("O1,fp32_module=a b"), "the module glob 'a b' cannot be written", "=head+blocks.*"),
        (lambda: Rule("bf16", module="head"), "unknown treatment 'bf16'", "the text low_module=head"),
        (lambda: Policy.O2("bf16").evolve(dtype="fp16"), "weights cannot be bfloat16", "the text O2,dtype=float16"),
        (lambda: Policy.parse("bf16"), "unknown level 'bf16'", 'Policy.O1("bf16"), the text O1,bf16'),
        (lambda: Policy.parse("O1,loss_scale=dynamic(init=1024,low=exp"), "a bracket is not closed", "init=1024)"),
        (lambda: Policy.O1(loss_scale="dynamic(init=1024"), "unknown loss scale", "a bracket is not closed"),
        (lambda: Policy.O1(loss_scale=1e99), "init is 1e+99", "to 3.4e38\n  write  2**16"),
    ],
)
def test_unknown_words_name_the_nearest_valid_one(make, says, suggests):
    with pytest.raises(PolicyError) as caught:
        make()
    assert says in str(caught.value)
    assert suggests in str(caught.value)


def test_a_dtype_that_no_policy_has_is_no_misspelt_word():
    with pytest.raises(PolicyError) as caught:
        Policy.O1(torch.float64)
    assert "did you mean" not in str(caught.value)


def test_all_problems_of_a_text_are_reported_together():
    with pytest.raises(PolicyError) as caught:
        Policy.parse("O1,dtype=int8,lists=x,low,low=exp,fp32_module=")
    text = str(caught.value)
    assert "4 problems" in text
    for part in (
        "unknown dtype 'int8'",
        "unknown lists 'x'",
        "'low' is not key=value",
        "'fp32_module=' is not",
    ):
        assert part in text


def test_a_key_that_stands_twice_is_refused():
    with pytest.raises(PolicyError, match="the key 'lists' stands twice"):
        Policy.parse("O1,lists=device,lists=portable")


@pytest.mark.parametrize("word", ["bf16", "BF16", "bfloat16", "Bfloat16", "torch.bfloat16"])
def test_a_dtype_has_its_words_wherever_it_stands(word):
    for text in (f"O2,{word}", f"O2,dtype={word}", f"O2,{word},param_dtype={word}", f"O2,{word},output_dtype={word}"):
        assert Policy.parse(text) == Policy.O2("bfloat16", **({"output_dtype": "bf16"} if "output" in text else {}))
    assert Policy.O1(word) == Policy.O1(torch.bfloat16)


@pytest.mark.parametrize(
    "text",
    [
        "O0",
        "O1,dtype=bfloat16",
        "O1,dtype=bfloat16,low=softmax+gelu,fp32_module=head.*",
        "O2,dtype=float16,loss_scale=constant(1024),fp32_param=*.scale",
        "O2,dtype=bfloat16,output_dtype=none,autocast=true,low=a::b,fp32=exp+log,low=tanh",
        "O1,dtype=float16,norms=fp32_math,emulate=false,fp32=softmax@blocks.*.attn",
    ],
)
def test_canonical_text_round_trips(text):
    assert str(Policy.parse(text)) == text


def test_text_is_forgiving_about_space_and_defaults():
    assert Policy.parse(" O1 , dtype = bfloat16 ") == Policy.O1("bfloat16")
    assert Policy.parse("O2") == Policy.O2()
    assert Policy.parse("O2,loss_scale=1024") == Policy.O2(loss_scale=1024)


def test_builders_put_their_rule_first():
    policy = Policy.O1().low("softmax", "exp").fp32("torch.softmax")
    assert policy.explain("softmax").treatment == "fp32"
    assert str(policy) == "O1,dtype=float16,fp32=torch.softmax,low=exp"  # the older rule could never win again


@pytest.mark.parametrize("treatment", TREATMENTS)
def test_each_builder_gives_its_treatment(treatment):
    policy = getattr(Policy.O1(), treatment)("gelu", "tanh")
    assert policy.explain("gelu").treatment == treatment
    assert policy.explain("torch.tanh").treatment == treatment
    assert str(policy) == f"O1,dtype=float16,{treatment}=gelu+tanh"


def test_builders_return_new_policies():
    policy = Policy.O1()
    policy.low("softmax")
    assert policy.rules == ()


@pytest.mark.parametrize("treatment", TREATMENTS)
def test_a_builder_that_names_no_op_is_refused(treatment):
    with pytest.raises(PolicyError) as caught:
        getattr(Policy.O1(), treatment)()
    write = f'policy.{treatment}("softmax"), the text {treatment}=softmax'
    assert str(caught.value) == f"{treatment}() names no op\n  write  {write}"


def test_explain_gives_rule_reason_and_source():
    policy = Policy.O1().keep_fp32(modules=["head"])
    inside = policy.explain("linear", "head.fc")
    assert (inside.treatment, inside.rule) == ("fp32", Rule("fp32", module="head"))
    assert "fp32_module=head" in inside.reason
    outside = policy.explain("linear", "body.fc")
    assert (outside.treatment, outside.rule, outside.reason) == ("low", None, "gemm")
    assert (inside.source, outside.source) == ("policy", "op table")
    without = Policy.O2().explain("linear")
    assert (without.treatment, without.source) == ("native", "level O2")


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
    assert Policy.O1().explain("exp_").source == "torch"
    assert Policy.O1().explain("torch.randn").source == "op table"


def test_explain_follows_the_device_lists_on_request():
    policy = Policy.O1(lists="device")
    assert policy.explain("softmax", device_type="cpu").treatment == "native"
    assert policy.explain("softmax", device_type="cuda").treatment == "fp32"
    assert Policy.O1().explain("softmax", device_type="cpu").treatment == "fp32"


def test_norms_fp32_math_is_softmax_and_normalisations():
    policy = Policy.O1(norms="fp32_math")
    assert {op for op in OPS if policy.explain(op).treatment == "fp32_math"} >= {
        "softmax",
        "layer_norm",
        "rms_norm",
    }
    assert policy.explain("exp").treatment == "fp32"


def test_op_and_module_must_both_match():
    policy = Policy.O1()._first([Rule("low", op="softmax", module="attn*")])
    assert policy.explain("softmax", "attn.0").treatment == "low"
    assert policy.explain("softmax", "mlp").treatment == "fp32"
    assert policy.explain("exp", "attn.0").treatment == "fp32"
    assert policy.explain("softmax").treatment == "fp32"


def test_keep_fp32_takes_one_glob_or_several():
    assert Policy.O1().keep_fp32(modules="head") == Policy.O1().keep_fp32(modules=["head"])
    assert str(Policy.O1().keep_fp32(modules="head", params=["a", "b"])) == (
        "O1,dtype=float16,fp32_module=head,fp32_param=a+b"
    )


def test_policies_are_values():
    one, two = Policy.parse("O1,low=exp"), Policy.O1().low("exp")
    assert one == two
    assert hash(one) == hash(two)
    assert one == pickle.loads(pickle.dumps(one)) == copy.deepcopy(one)
    with pytest.raises(AttributeError):
        one.level = "O2"


def test_differences_name_each_field():
    lines = Policy.O1().differences(Policy.O2("bfloat16").low("exp"))
    assert "level: O1 → O2" in lines
    assert "dtype: float16 → bfloat16" in lines
    assert "rules: no rules → low=exp" in lines
    assert Policy.O1().differences(Policy.O1()) == ()


@pytest.mark.parametrize(
    "rule, says",
    [
        (lambda: Rule("low"), "must match something"),
        (lambda: Rule("low", op=""), "must match something"),
        (lambda: Rule("low", param="*.scale", module="head"), "also names an op or a module"),
        (lambda: Rule("ban", param="*.scale"), "a parameter cannot be treated as 'ban'"),
        (lambda: Rule("low", op="exp,log"), "cannot be written in a policy's text"),
        (lambda: Rule("low", module="a(b"), "cannot be written in a policy's text"),
        (lambda: Rule("low", module="a#b"), "cannot be written in a policy's text"),
        (lambda: Rule("low", module="a\u00a0b"), "cannot be written in a policy's text"),
        (lambda: Rule("low", op=3), "the op glob is 3, not text"),
        (lambda: Rule("low", op="exp", reason=3), "the reason is 3, not text"),
        (lambda: Policy.parse("O1,fp32=softmax@"), "cannot be written in a policy's text"),
        (lambda: Policy.parse(None), "a policy's text is not None"),
        (
            lambda: Policy.parse("O1,low=softmax+exp,fp32=aten::softmax.int"),
            "is named twice, with different treatments",
        ),
        (lambda: Policy.O1(rules=3), "rules must be a tuple of Rule"),
    ],
)
def test_rules_without_a_meaning_are_refused(rule, says):
    with pytest.raises(PolicyError, match=says):
        rule()


def test_a_reason_takes_no_part_in_comparison():
    assert Rule("low", op="exp", reason="measured") == Rule("low", op="exp")


def test_a_file_is_the_text_one_entry_a_line_with_the_reasons(tmp_path):
    reasoned = (Rule("low", op="exp", reason='range # "checked"\n2026 – ok'), Rule("fp32", param="*.g"))
    policy = Policy.O2("bfloat16", output_dtype=None, loss_scale=8, rules=reasoned)
    policy.save(tmp_path / "mine.policy")
    _, *lines = (tmp_path / "mine.policy").read_text().splitlines()
    assert lines == [
        "O2", "dtype=bfloat16", "output_dtype=none", "loss_scale=constant(8)",
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


@pytest.mark.parametrize(
    "text, says",
    [
        ("O1\ndtpye=float16", ["line 2: unknown policy key 'dtpye'", "mine.policy", "did you mean 'dtype'?"]),
        ("# mine\n\nO9", ["line 3: unknown level 'O9'", "valid: O0, O1, O2, O3"]),
        ("O1\nlow=exp\nkeep_fp32=head  # why\nfp32=sofmax\ndtype", [
            "3 problems", "1. line 3: unknown policy key 'keep_fp32'", "the text fp32_module=head",
            "2. line 4: unknown op 'sofmax'", "the text fp32=softmax", "3. line 5: 'dtype' is not key=value",
        ]),
        ("O1\n\ndtype=flaot16", ["line 3: unknown dtype 'flaot16'", "did you mean 'float16'?"]),
        ("O1\nloss_scale=dynamic(init=8\nlists=x", ["line 2: a bracket is not closed", "line 3: unknown lists 'x'"]),
        ("O1\nlow=exp\nban_module=head", ["line 3: a module cannot be treated as 'ban'", "the text ban=*@head"]),
        ("O0\ndtype=float16", ["mine.policy", "O0 cannot compute in float16"]),
        ("", ["mine.policy", "there is no level"]),
        ('version = 1\nlevel = "O2"\n\n[[rules]]\ntreatment = "fp32"\nmodule = "head"', [
            "mine.policy' is TOML", "one entry a line", "write  O2\n         dtype=bfloat16\n",
        ]),
    ],
)  # fmt: skip
def test_wrong_policy_files_say_which_lines_are_wrong(tmp_path, text, says):
    (tmp_path / "mine.policy").write_text(text)
    with pytest.raises(PolicyError) as caught:
        Policy.load(tmp_path / "mine.policy")
    for part in says:
        assert part in str(caught.value)


def test_a_missing_policy_file_is_named(tmp_path):
    with pytest.raises(PolicyError, match=r"there is no policy file .*nowhere\.policy'\n  write  .*mezzo tune"):
        Policy.of(str(tmp_path / "nowhere.policy"))


def test_a_text_may_end_as_a_file_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Policy.of("O1,fp32_module=actor.policy") == Policy.O1().keep_fp32(modules=["actor.policy"])
    with pytest.raises(PolicyError, match="unknown policy key 'fp32_modul'"):
        Policy.of("O1,fp32_modul=actor.policy")


def test_a_policy_file_may_have_any_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    policy = Policy.O2("bfloat16").low("exp")
    for name in ("mine.txt", "O1", "O9"):
        policy.save(name)
    assert Policy.of("mine.txt") == Policy.of("O9") == policy
    assert Policy.of("O1") == Policy.O1(), "a policy's text is one, whatever lies beside it"
    (tmp_path / "notes.txt").write_text("my notes")
    with pytest.raises(PolicyError, match=r"policy file 'notes\.txt': line 1: unknown level 'my notes'"):
        Policy.of("notes.txt")
    (tmp_path / "notes.txt").write_bytes(b"\xff")
    with pytest.raises(PolicyError, match=r"notes\.txt' is not a policy file"):
        Policy.of("notes.txt")
    with pytest.raises(PolicyError, match="unknown level"):
        Policy.of("nothing.txt")
    with pytest.raises(PolicyError, match="this is a folder"):
        Policy.of(str(tmp_path))


def test_an_unwritable_place_leaves_no_half_file(tmp_path):
    (tmp_path / "mine.policy").mkdir()
    with pytest.raises(PolicyError, match=r"cannot be written to .*mine\.policy"):
        Policy.O1().save(tmp_path / "mine.policy")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.policy"]


def test_of_refuses_other_things():
    with pytest.raises(PolicyError, match="a policy cannot be made from int"):
        Policy.of(3)


globs = st.text(string.ascii_lowercase + ".*_", min_size=1, max_size=8).filter(str.strip)
op_rules = st.builds(
    lambda treatment, op, module: Rule(treatment, op=op, module=module),
    st.sampled_from(TREATMENTS), st.sampled_from(sorted(OPS)) | st.just("conv*"), st.none() | globs,
)  # fmt: skip
module_rules = st.builds(lambda treatment, glob: Rule(treatment, module=glob), st.sampled_from(["low", "fp32"]), globs)
param_rules = st.builds(lambda treatment, glob: Rule(treatment, param=glob), st.sampled_from(["low", "fp32"]), globs)


@given(
    level=st.sampled_from(["O1", "O2", "O3"]),
    dtype=st.sampled_from(["float16", "bfloat16"]),
    fields=st.fixed_dictionaries(
        {},
        optional={
            "output_dtype": st.sampled_from([None, "float32", "bfloat16"]),
            "lists": st.sampled_from(["portable", "device"]),
            "norms": st.sampled_from(["fp32", "fp32_math"]),
            "emulate": st.sampled_from(["auto", True, False]),
        },
    ),
    rules=st.lists(op_rules | module_rules | param_rules, max_size=5, unique_by=lambda rule: rule.selector),
)
def test_any_policy_round_trips_through_its_text(level, dtype, fields, rules):
    policy = getattr(Policy, level)(dtype, rules=tuple(rules), **fields)
    assert Policy.parse(str(policy)) == policy


@pytest.mark.parametrize(
    "word, dtype", [("bf16", "bfloat16"), ("fp16", "float16"), ("bfloat16", "bfloat16"), ("half", "float16")]
)
def test_a_word_for_a_dtype_stands_wherever_one_does(word, dtype):
    for level in ("O1", "O2", "O3"):
        assert getattr(Policy, level)(word) == Policy.parse(f"{level},dtype={word}") == getattr(Policy, level)(dtype)
        assert Policy.parse(f"{level},{word},output_dtype={word}").output_dtype == getattr(torch, dtype)
        assert getattr(Policy, level)(word, output_dtype="fp32").output_dtype == torch.float32
        assert Policy.O2(dtype).evolve(output_dtype=word).output_dtype == getattr(torch, dtype)
        assert Policy.parse(f"{level},{word}") == Policy.parse(f"{level},dtype={dtype}")
        assert Policy.parse(f"{level},{word},fp32=softmax") == Policy.parse(f"{level},dtype={dtype},fp32=softmax")


def test_a_bare_word_beside_a_dtype_is_refused():
    with pytest.raises(PolicyError, match="the key 'dtype' stands twice"):
        Policy.parse("O1,bf16,dtype=float16")
