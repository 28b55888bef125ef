"""Policies side by side: same start, same batches, and everything refused before training."""

import dataclasses
import json
import math

import pytest
import torch
from torch import nn

from mezzo.errors import PolicyError, UnsupportedError
from mezzo.policy import Policy
from mezzo.recipes import comparison as module
from mezzo.recipes import get
from mezzo.recipes.comparison import compare
from mezzo.recipes.digits_cnn import DigitsNet
from mezzo.recipes.docs_lm import ByteGPT
from mezzo.recipes.recipe import own_seed


class Counting:
    """A watcher that may raise at one step of one policy."""

    def __init__(self, at=None, error=KeyboardInterrupt):
        self.at, self.error, self.steps = at, error, 0

    def started(self, policy, steps):
        self.policy = str(policy)

    def stepped(self, record):
        self.steps += 1
        if (record.policy, record.step) == self.at:
            raise self.error

    def ended(self, result):
        pass


def test_every_policy_sees_the_same_weights_and_batches(tiny):
    seen = []

    class Spy(nn.Sequential):
        def forward(self, inputs):
            if self.training:
                seen.append((inputs.sum().item(), [p.float().sum().item() for p in self.parameters()]))
            return super().forward(inputs)

    def build(seed):
        return Spy(*tiny.build(seed))

    recipe = dataclasses.replace(tiny, build=build)
    compare(recipe, ["O0", "O1,dtype=bfloat16", "O0,lists=device"], steps=5, seed=4)
    first, second, third = seen[:5], seen[5:10], seen[10:]
    assert [batch for batch, _ in first] == pytest.approx([batch for batch, _ in second], abs=0.5)
    assert first == third
    assert first[0][1] == second[0][1]


def test_a_comparison_alone_and_in_company_gives_the_same_rows(tiny):
    alone = compare(tiny, ["O2,dtype=bfloat16"], steps=10).rows[0]
    company = compare(tiny, ["O0", "O1,dtype=float16", "O2,dtype=bfloat16"], steps=10).rows[2]
    keep = ("final_metric", "best_metric", "final_loss", "saved_bytes", "state_bytes", "final_scale")
    assert [getattr(alone, name) for name in keep] == [getattr(company, name) for name in keep]


@pytest.mark.parametrize(
    "policies, reference",
    [
        (["O0", "O1,dtype=bfloat16"], "O0"),
        (["O1,dtype=bfloat16", "O0"], "O0"),
        (["O1,dtype=bfloat16", "O2,dtype=bfloat16"], "O1,dtype=bfloat16"),
    ],
)
def test_differences_are_to_fp32_or_else_to_the_first(tiny, policies, reference):
    result = compare(tiny, policies, steps=3)
    assert result.reference == reference
    base = next(row for row in result.rows if row.policy == reference)
    for row in result.rows:
        difference = result.difference(row)
        if row is base:
            assert difference is None
        else:
            assert difference == row.final_metric - base.final_metric


def test_the_summary_says_everything_and_is_strict_json(tiny, tmp_path):
    result = compare(tiny, ["O0", "O2,dtype=float16"], steps=12, seed=9, out=tmp_path / "run")
    assert result.directory == tmp_path / "run"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary == json.loads(json.dumps(result.to_dict()))
    assert (summary["schema"], summary["recipe"], summary["seed"], summary["steps"]) == (1, "tiny", 9, 12)
    assert summary["policies"] == ["O0", "O2,dtype=float16"] == [row["policy"] for row in summary["rows"]]
    assert summary["interrupted"] is False
    assert summary["references"] == {"nothing learned": 8.0}
    assert summary["data_sha256"] == tiny.load().sha256()
    assert summary["machine"]["torch"] == torch.__version__
    assert summary["machine"]["threads"] == torch.get_num_threads()
    assert {"cpu", "cores", "device", "mezzo", "python"} <= summary["machine"].keys()
    row = summary["rows"][1]
    assert row["state_bytes"]["total"] == sum(
        row["state_bytes"][part] for part in ("weights", "gradients", "remainders", "optimizer")
    )
    assert row["step_ms"]["p10"] <= row["step_ms"]["median"] <= row["step_ms"]["p90"]
    assert row["difference"] == row["final_metric"] - summary["rows"][0]["final_metric"]


def test_metrics_hold_one_line_for_each_step_of_each_policy(tiny, tmp_path):
    compare(tiny, ["O0", "O1,dtype=bfloat16"], steps=6, out=tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["policy"], line["step"]) for line in lines] == [
        (policy, step) for policy in ("O0", "O1,dtype=bfloat16") for step in range(1, 7)
    ]
    assert set(lines[0]) == {"policy", "step", "loss", "scale", "skipped", "grad_norm", "ms", "metric"}
    assert all(math.isfinite(line["grad_norm"]) and line["ms"] > 0 for line in lines)


def test_without_out_nothing_is_written(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert compare(tiny, ["O0"], steps=2).directory is None
    assert list(tmp_path.iterdir()) == []


def test_wrong_policies_are_reported_together_before_any_training(tiny, tmp_path):
    watcher = Counting()
    with pytest.raises(PolicyError) as error:
        compare(tiny, ["O9", "O0", "O1,dtype=flaot16", "O0"], out=tmp_path / "run", watcher=watcher)
    text = str(error.value)
    assert text.startswith("3 problems\n1. ")
    assert "unknown level 'O9'" in text
    assert "flaot16" in text
    assert "float16" in text
    assert "3. the policy O0 is listed twice\n" in text
    assert watcher.steps == 0
    assert not (tmp_path / "run").exists()


def test_a_policy_file_is_a_policy_and_a_missing_one_is_reported_with_the_others(tiny, tmp_path):
    policy = Policy.O1("bfloat16").low("softmax")
    policy.save(tmp_path / "mine.policy")
    assert compare(tiny, ["O0", str(tmp_path / "mine.policy")], steps=1).policies == ("O0", str(policy))
    with pytest.raises(
        PolicyError, match=r"(?s)^2 problems\n1. there is no policy file .*nowhere.policy.*unknown level 'O9'"
    ):
        compare(tiny, [str(tmp_path / "nowhere.policy"), "O9"])


def test_no_policy_at_all_is_refused(tiny):
    with pytest.raises(PolicyError, match=r'no policy to compare\n  write  policies=\["O0", "O1,dtype=bfloat16"\]'):
        compare(tiny, [])


def test_a_taken_directory_is_refused_before_any_training(tiny, tmp_path):
    (tmp_path / "mine.txt").write_text("x")
    watcher = Counting()
    with pytest.raises(PolicyError, match="files that no mezzo run wrote"):
        compare(tiny, ["O0"], out=tmp_path, watcher=watcher)
    assert watcher.steps == 0


def test_what_the_device_cannot_do_is_said_for_all_policies_before_any_training(tiny, tmp_path, monkeypatch):
    class Refusing(module.Training):
        def __init__(self, recipe, policy, *args, **kwargs):
            if policy.dtype == torch.float16:
                raise UnsupportedError(f"no {policy} here")
            super().__init__(recipe, policy, *args, **kwargs)

    monkeypatch.setattr(module, "Training", Refusing)
    watcher = Counting()
    with pytest.raises(UnsupportedError) as error:
        compare(tiny, ["O0", "O1", "O1,dtype=bfloat16", "O2"], out=tmp_path / "run", watcher=watcher)
    assert str(error.value) == "2 problems\n1. no O1,dtype=float16 here\n2. no O2,dtype=float16 here"
    assert watcher.steps == 0
    assert not (tmp_path / "run").exists()


def test_after_ctrl_c_finished_policies_are_written_and_the_partial_one_is_marked(tiny, tmp_path):
    policies = ["O0", "O1,dtype=bfloat16", "O2,dtype=bfloat16"]
    watcher = Counting(at=("O1,dtype=bfloat16", 4))
    result = compare(tiny, policies, steps=10, out=tmp_path / "run", watcher=watcher)
    assert result.interrupted
    assert [(row.policy, row.status, row.steps) for row in result.rows] == [
        ("O0", "finished", 10),
        ("O1,dtype=bfloat16", "interrupted", 4),
    ]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["interrupted"] is True
    assert summary["policies"] == policies
    assert [row["status"] for row in summary["rows"]] == ["finished", "interrupted"]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 14


def test_another_error_leaves_the_steps_so_far_and_gives_the_model_back(tiny, tmp_path):
    watcher = Counting(at=("O2,dtype=bfloat16", 2), error=ZeroDivisionError)
    models = []
    recipe = dataclasses.replace(tiny, build=lambda seed: models.append(tiny.build(seed)) or models[-1])
    with pytest.raises(ZeroDivisionError):
        compare(recipe, ["O2,dtype=bfloat16"], steps=10, out=tmp_path / "run", watcher=watcher)
    assert {child.name for child in (tmp_path / "run").iterdir()} == {"metrics.jsonl.partial", "summary.json.partial"}
    assert all(param.dtype == torch.float32 for model in models for param in model.parameters())


def test_the_default_policies_begin_in_the_format_for_the_machine(monkeypatch):
    for fast, other in ((torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)):
        monkeypatch.setattr(module, "fast_format", lambda kinds, fast=fast: fast)
        found = module.default_policies()
        assert [str(Policy.parse(text)) for text in found] == list(found)
        assert [(p.level, p.dtype) for p in map(Policy.parse, found)] == [
            ("O0", torch.float32), ("O1", fast), ("O2", fast), ("O3", fast), ("O1", other), ("O2", other),
        ]  # fmt: skip


@pytest.mark.parametrize(
    "policies",
    [
        ["O0", "O1,dtype=float16", "O2,dtype=bfloat16"],
        pytest.param(
            ["O0", *(f"{level},dtype={dtype}" for dtype in ("float16", "bfloat16") for level in ("O1", "O2", "O3"))],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["three", "all"],
)
def test_a_short_real_run_learns_under_the_default_policies(emulating, policies):
    """The honest short form of the slow criteria: 40 of 300 steps at half the width, far above chance, as FP32."""
    digits = get("digits-cnn")
    seen = []

    def build(seed):
        with own_seed(seed):
            return DigitsNet(width=16)

    def evaluate(model, split):  # after the last step only: it takes as long as thirty steps
        seen.append(model)
        return digits.evaluate(model, split) if len(seen) % 10 == 0 else 0.0

    result = compare(dataclasses.replace(digits, build=build, evaluate=evaluate), policies, steps=40)
    rows = {row.policy: row for row in result.rows}
    assert list(rows) == list(policies)
    fp32 = rows["O0"].final_metric
    assert fp32 > 93.0
    for policy, row in rows.items():
        assert row.nonfinite_losses == 0
        if not policy.startswith("O3"):
            assert row.final_metric > fp32 - 3.0, policy
        if policy[:2] in ("O2", "O3"):
            assert row.saved_bytes < 0.75 * rows["O0"].saved_bytes, policy


def test_of_the_default_policies_o3_is_left_out_where_the_optimizer_has_no_room_for_it(emulating, caplog, monkeypatch):
    """AdamW's ``eps`` is zero in FP16. One who asks for it is refused."""
    monkeypatch.setattr(module, "fast_format", lambda kinds: torch.float16)
    recipe = dataclasses.replace(get("docs-lm"), evaluate=lambda model, split: 0.0, build=lambda _: ByteGPT(32, 2, 1))
    result = compare(recipe, steps=1)
    usual = module.default_policies()
    assert [row.policy for row in result.rows] == [each for each in usual if not each.startswith("O3")]
    assert list(result.policies) == [row.policy for row in result.rows]
    assert "O3,dtype=float16 is left out: eps=1e-08 is zero in float16" in caplog.text
    with pytest.raises(UnsupportedError, match="eps=1e-08 is zero in float16"):
        compare(recipe, ["O0", "O3,dtype=float16"], steps=1)


def test_o2_saves_at_most_62_percent_of_fp32_for_backward_on_docs_lm(emulating):
    recipe = dataclasses.replace(get("docs-lm"), evaluate=lambda model, split: 0.0)
    result = compare(recipe, ["O0", "O2,dtype=float16", "O2,dtype=bfloat16"], steps=1)
    fp32, *low = (row.saved_bytes for row in result.rows)
    assert fp32 > 10 * 2**20
    for saved in low:
        assert saved <= 0.62 * fp32
