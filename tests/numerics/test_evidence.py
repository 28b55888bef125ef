"""Evidence as a value and as a file: sums, what is not there, round trips, cut lines, newer and broken files."""

import math

import torch

from mezzo.numerics import Evidence, RecordedStep, RecordedTensor, SwallowedUpdates, exponent_histogram, read_evidence
from mezzo.numerics.evidence import FILE, KINDS, EvidenceHeader, RecordedModule, kind_of, write

SPECIAL = torch.tensor([0.0, -0.0, 2.0**-149, 1.0, -2.0, 3.0, 65504.0, 3.4e38, math.inf, -math.inf, math.nan])


def values(seed, count=500):
    generator = torch.Generator().manual_seed(seed)
    return torch.cat([torch.randn(count, generator=generator) * 2.0 ** (seed - 20), SPECIAL])


def recorded(tensor_kind, module, name, seed):
    lost = SwallowedUpdates(updated=seed + 3, swallowed={"float16": seed, "bfloat16": 2}, beyond=1)
    options = {"histogram": exponent_histogram(values(seed)), "swallowed": lost if tensor_kind == "updates" else None}
    return RecordedTensor(kind=tensor_kind, module=module, name=name, dtype="float16", **options)


def example(**changes):
    weight = {"parameters": {"weight": "float32"}}
    modules = (
        RecordedModule(path="embed", type="Embedding", **weight),
        RecordedModule(path="blocks.0", type="Block"),
        RecordedModule(path="blocks.1", type="Block", same_as="blocks.0"),
        RecordedModule(path="head", type="Linear", tied={"weight": "embed.weight"}, **weight),
        RecordedModule(path="unused", type="Linear"),
    )
    header = EvidenceHeader(
        mezzo="0.1.0", model="Net", policy="O1", compute_dtype="float16", loss_scale="dynamic", every=10,
        kinds=("weights", "activations", "updates"), formats=("float16", "bfloat16"), modules=modules,
    )  # fmt: skip
    first = (
        recorded("weights", "embed", "weight", 1), recorded("activations", "blocks.0", "output", 2),
        recorded("activations", "head", "output", 3), recorded("updates", "embed", "weight", 4),
    )  # fmt: skip
    last = recorded("weights", "embed", "weight", 5), recorded("activations", "blocks.0", "output[0]", 6)
    steps = (
        RecordedStep(step=1, loss_scales=(65536.0,), skipped=False, tensors=first),
        RecordedStep(step=11, loss_scales=(math.inf,), skipped=True, tensors=last),
    )
    return Evidence(**({"header": header, "steps": steps, "num_steps": 17} | changes))


def same(one, other):
    """Whether two pieces of evidence are equal, histograms by their counts."""

    def plain(evidence):
        return [
            (step.step, step.loss_scales, step.skipped, [
                (t.kind, t.module, t.name, t.dtype, t.histogram.numbers, t.swallowed) for t in step.tensors
            ])
            for step in evidence.steps
        ]  # fmt: skip

    return (one.header, one.num_steps, plain(one)) == (other.header, other.num_steps, plain(other))


def counted(*seeds):
    return exponent_histogram(torch.cat([values(seed) for seed in seeds])).numbers


def test_kinds_are_known_in_every_spelling():
    for tensor_kind in KINDS:
        title = f" {tensor_kind.replace('_', ' ').title()} "
        for name in (tensor_kind, tensor_kind.removesuffix("s"), tensor_kind.replace("_", "-"), title):
            assert kind_of(name) == tensor_kind, name


def test_histograms_are_summed_over_modules_steps_and_kinds():
    evidence = example()
    assert evidence.histogram("weight", "embed").numbers == counted(5), "the newest step"
    assert evidence.histogram("weights", "embed", step=1).numbers == counted(1)
    assert evidence.histogram("weights", step="all").numbers == counted(1, 5)
    assert evidence.histogram("weights", "head").numbers == counted(5), "tied, and so recorded as the other's"
    assert evidence.histogram("activations", "blocks.1", step=1).numbers == counted(2), "the same module"
    assert evidence.histogram("activations", "blocks.*", step="all").numbers == counted(2, 6), "each place once"
    assert evidence.histogram("activations", step=1).numbers == counted(2, 3)
    assert evidence.histogram(("weights", "activations"), step=1).numbers == counted(1, 2, 3)
    assert evidence.histogram("activations", name="output[0]").numbers == counted(6)
    assert evidence.histogram("updates").numbers == counted(4), "the newest step that has any"


def test_swallowed_updates_are_summed_and_shares_of_none_are_nan():
    lost = example().swallowed("head")
    assert (lost.share("half"), lost.share(torch.bfloat16)) == (4 / 7, 2 / 7)
    total = lost + SwallowedUpdates(updated=3, swallowed={"float16": 1}, beyond=2)
    assert (total.updated, total.swallowed, total.beyond) == (10, {"float16": 5}, 3)
    assert math.isnan(SwallowedUpdates(updated=0, swallowed={"float16": 0}, beyond=0).share("float16"))


def test_a_file_gives_back_what_was_written_and_of_a_killed_run_all_whole_lines(tmp_path):
    evidence = example(num_steps=11)
    write(evidence, tmp_path / FILE)
    assert same(read_evidence(tmp_path / FILE), evidence)
    assert same(read_evidence(tmp_path), evidence)
    text = (tmp_path / FILE).read_text()
    for end in ("\n", text.splitlines()[2][:-1], '{"step"'):
        (tmp_path / FILE).write_text("".join(text.splitlines(keepends=True)[:2]) + end.rstrip("\n"))
        read_back = read_evidence(tmp_path)
        assert [step.step for step in read_back.steps] == [1], end
