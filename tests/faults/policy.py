"""Faults of ``policy/``."""

from .fault import in_file

FAULTS = (
    *in_file(
        "policy/policy.py",
        (
            "policy: the last rule wins",
            "rules=(*first, *kept)",
            "rules=(*kept, *first)",
            "tests/policy/test_policy.py",
            "a rule that is added would change nothing",
        ),
        (
            "policy: batch norm is never low",
            "if is_norm and self.keep_batchnorm_fp32:",
            "if is_norm:",
            ("tests/policy/test_policy.py", "tests/cast/test_prepare.py"),
            "keep_batchnorm_fp32=false would do nothing",
        ),
        (
            "policy: norms are FP32 on accelerators",
            'return entry.cuda if norms == "fp32" else entry.portable',
            "return entry.cuda",
            "tests/policy/test_decide.py",
            "norms=fp32_math would be CUDA's lists",
        ),
        (
            "policy: in-place ops are cast",
            "if (form := written_form(op, name)) is not None:",
            "if False:",
            ("tests/policy/test_forms.py", "tests/policy/test_policy.py"),
            "P13: explain would promise a cast of exp_ that cannot be",
        ),
    ),
    *in_file(
        "policy/rules.py",
        (
            "policy: a rule on a block misses its layers",
            "for part in _ancestry(path))",
            "for part in (path,))",
            ("tests/policy/test_policy.py", "tests/cast/test_prepare.py"),
            "keep_fp32(modules=['head']) would leave head.fc low",
        ),
        (
            "policy: a rule on a module holds everywhere",
            "module is not None and self.matches_module(module)",
            "module is None or self.matches_module(module)",
            ("tests/policy/test_policy.py", "tests/policy/test_decide.py"),
            "softmax@head would be every softmax outside a model",
        ),
    ),
    *in_file(
        "policy/ops/table.py",
        (
            "policy: experts stay FP32",
            '_Rows("low", "gemm", "grouped_mm"',
            '_Rows("native", "gemm", "grouped_mm"',
            "tests/policy/test_ops.py",
            "U3: most of a mixture's FLOPs would run in FP32",
        ),
    ),
    *in_file(
        "policy/fields.py",
        (
            "policy: FP16 is unscaled in FP16",
            "if param_dtype == torch.float16 and level",
            "if False and level",
            "tests/policy/test_policy.py",
            "O3 in FP16 under a scale would flush gradients",
        ),
    ),
    *in_file(
        "policy/text.py",
        (
            "policy: a file's reasons are lost",
            "parse_rules(words[0], words[2], reason)",
            "parse_rules(words[0], words[2])",
            "tests/policy/test_policy.py",
            "explain could not say why a rule of a file is there",
        ),
        (
            "policy: a wrong line has the number of the one before",
            "enumerate(_LINE_END.split(text), start=1)",
            "enumerate(_LINE_END.split(text))",
            "tests/policy/test_policy.py",
            "a user would look at the wrong line",
        ),
    ),
    *in_file(
        "policy/spelling.py",
        (
            "policy: cures in Python reverse their rules",
            "calls[:0] = [call] if call else []",
            "calls += [call] if call else []",
            "tests/policy/test_spelling.py",
            "the two spellings of a cure would be two policies",
        ),
    ),
)
