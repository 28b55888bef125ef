"""Evidence as a value and as a file: sums, what is not there, round trips, cut lines, newer and broken files."""

import json
import math

import pytest
import torch

from mezzo.errors import PolicyError, StateError
from mezzo.numerics import Evidence, RecordedStep, RecordedTensor, SwallowedUpdates, exponent_histogram, read_evidence
from mezzo.numerics.evidence import KINDS, EvidenceHeader, RecordedModule, kind_of
from mezzo.numerics.evidence_file import FILE, PARTIAL, write

SPECIAL = torch.tensor([0.0, -0.0, 2.0**-149, 1.0, -2.0, 3.0, 65504.0, 3.4e38, math.inf, -math.inf, math.nan])


def values(seed, count=500):
    generator = torch.Generator().manual_seed(seed)
    return torch.cat([torch.randn(count, generator=generator) * 2.0 ** (seed - 20), SPECIAL])


def recorded(kind, module, name, seed):
    lost = SwallowedUpdates(updated=seed + 3, swallowed={"float16": seed, "bfloat16": 2}, beyond=1)
    return RecordedTensor(
        kind=kind,
        module=module,
        name=name,
        dtype="float16",
        histogram=exponent_histogram(values(seed)),
        swallowed=lost if kind == "updates" else None,
    )


def example(**changes):
    header = EvidenceHeader(
        mezzo="0.1.0",
        model="Net",
        policy="O1",
        compute_dtype="float16",
        loss_scale="dynamic",
        every=10,
        kinds=("weights", "activations", "updates"),
        formats=("float16", "bfloat16"),
        modules=(
            RecordedModule(path="embed", type="Embedding", parameters={"weight": "float32"}),
            RecordedModule(path="blocks.0", type="Block"),
            RecordedModule(path="blocks.1", type="Block", same_as="blocks.0"),
            RecordedModule(
                path="head", type="Linear", parameters={"weight": "float32"}, tied={"weight": "embed.weight"}
            ),
            RecordedModule(path="unused", type="Linear"),
        ),
    )
    steps = (
        RecordedStep(
            step=1,
            loss_scales=(65536.0,),
            skipped=False,
            tensors=(
                recorded("weights", "embed", "weight", 1),
                recorded("activations", "blocks.0", "output", 2),
                recorded("activations", "head", "output", 3),
                recorded("updates", "embed", "weight", 4),
            ),
        ),
        RecordedStep(
            step=11,
            loss_scales=(math.inf,),
            skipped=True,
            tensors=(recorded("weights", "embed", "weight", 5), recorded("activations", "blocks.0", "output[0]", 6)),
        ),
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

    return (one.header, one.num_steps, one.is_partial, plain(one)) == (
        other.header, other.num_steps, other.is_partial, plain(other)
    )  # fmt: skip


def counted(*seeds):
    return exponent_histogram(torch.cat([values(seed) for seed in seeds])).numbers


def test_kinds_are_known_in_every_spelling():
    for kind in KINDS:
        for name in (kind, kind.removesuffix("s"), kind.replace("_", "-"), f" {kind.replace('_', ' ').title()} "):
            assert kind_of(name) == kind, name
    with pytest.raises(PolicyError, match="did you mean 'activation_gradients'"):
        kind_of("activation grad")
    with pytest.raises(PolicyError, match="did you mean 'weights'") as error:
        kind_of("wheights")
    assert str(error.value).endswith('write  "weights"')
    with pytest.raises(PolicyError, match="unknown kind of tensors 3"):
        kind_of(3)


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
    none = SwallowedUpdates(updated=0, swallowed={"float16": 0}, beyond=0)
    assert math.isnan(none.share("float16"))
    with pytest.raises(PolicyError, match=r'(?s)not recorded.*recorded: float16.*formats=\("float8_e5m2"'):
        none.share("e5m2")


def test_what_is_not_there_says_why():
    evidence = example()
    for call, error, words in (
        (lambda: evidence.histogram("weights", "blocks.7"), PolicyError, r"did you mean 'blocks\.\d'"),
        (lambda: evidence.histogram("weight_gradients"), StateError, "recorded: weights, activations, updates"),
        (lambda: evidence.histogram(3), PolicyError, "unknown kind of tensors 3"),
        (lambda: evidence.histogram("activations", "unused"), StateError, "no recorded step called it"),
        (lambda: evidence.histogram("updates", step=11), StateError, "step 11 was skipped"),
        (lambda: evidence.histogram("updates", "embed", step=2), StateError, "recorded: 1, 11"),
        (lambda: evidence.histogram("updates", name="bias"), StateError, "there are weight"),
        (lambda: evidence.histogram("updates", step="last"), PolicyError, 'step="newest"'),
        (lambda: example(steps=()).histogram("updates"), StateError, "no step was recorded yet, of 17 taken"),
    ):
        with pytest.raises(error, match=words):
            call()


@pytest.mark.parametrize("is_partial", [False, True])
def test_a_file_gives_back_what_was_written(tmp_path, is_partial):
    evidence = example(is_partial=is_partial, num_steps=11 if is_partial else 17)
    write(evidence, tmp_path / FILE)
    for path in (tmp_path, tmp_path / FILE):
        found = read_evidence(path)
        assert same(found, evidence)
    for one, other in zip(found.steps[0].tensors, evidence.steps[0].tensors, strict=True):
        assert one.histogram.coverage("float16", 3.7) == other.histogram.coverage("float16", 3.7)
        assert one.histogram.max_abs == other.histogram.max_abs


def test_a_run_that_goes_on_is_read_from_its_partial_file(tmp_path):
    write(example(is_partial=True), tmp_path / (FILE + PARTIAL))
    assert read_evidence(tmp_path).is_partial
    write(example(), tmp_path / FILE)
    assert not read_evidence(tmp_path).is_partial


def test_a_file_may_be_cut_off_anywhere_after_its_first_line(tmp_path):
    write(example(), tmp_path / FILE)
    text = (tmp_path / FILE).read_bytes()
    first, second, third, _ = text.splitlines(keepends=True)
    for end in {len(first), len(first) + 1, len(first + second) - 1, len(first + second) + 40, len(text) - 3}:
        (tmp_path / FILE).write_bytes(text[:end])
        found = read_evidence(tmp_path)
        assert found.is_partial, end
        assert len(found.steps) == (end >= len(first + second) - 1) + (end >= len(first + second + third)), end
    (tmp_path / FILE).write_bytes(first[:-5])
    with pytest.raises(StateError, match=r"(?s)evidence\.jsonl, line 1.*no whole first line"):
        read_evidence(tmp_path)


def test_broken_and_newer_files_are_refused_with_file_and_line(tmp_path):
    path = tmp_path / FILE
    write(example(), path)
    good = [json.loads(line) for line in path.read_text().splitlines()]

    def changed(line, *keys, to):
        lines = json.loads(json.dumps(good))
        place = lines[line - 1]
        for key in keys[:-1]:
            place = place[key]
        if to is None:
            del place[keys[-1]]
        else:
            place[keys[-1]] = to
        return "".join(json.dumps(each) + "\n" for each in lines)

    update = ("tensors", 3)
    for text, line, words in (
        (changed(1, "schema", to=2), 1, "schema 2, and this version of mezzo reads schema 1"),
        (changed(1, "modules", 0, "path", to=None), 1, "modules 0 has no path"),
        (changed(1, "kinds", 0, to="wights"), 1, "'wights' is no kind"),
        (changed(1, "formats", 0, to="float12"), 1, "unknown number format 'float12'"),
        (changed(1, "policy", to="O9"), 1, "policy 'O9': unknown level 'O9'"),
        (changed(2, "loss_scales", to=[True]), 2, "loss_scales 0 is True, not a number"),
        (changed(2, "tensors", 0, "counts", "-200", to=1), 2, "'-200', which is not from -149 to 127"),
        (changed(2, "tensors", 0, "powers", "0", to=99999), 2, "99999 powers of two among"),
        (changed(2, "tensors", 0, "zeros", to=-1), 2, "tensors 0, zeros is -1, not a count"),
        (changed(2, "tensors", 0, "max_abs", to="nan"), 2, "not a finite magnitude"),
        (changed(2, *update, "swallowed", to=None), 2, "it has no swallowed of 'weight'"),
        (changed(3, "step", to=1), 3, "step 1 after step 1"),
        (changed(3, "skipped", to="no"), 3, "skipped is 'no', not true or false"),
        (changed(2, "tensors", 0, "counts", "0", to="3"), 2, "tensors 0, counts 0 is '3', not a count"),
        (changed(2, *update, "swallowed", "beyond", to=None), 2, "tensors 3, swallowed has no beyond"),
        (changed(2, *update, "swallowed", "by_format", "float16", to=0.5), 2, "by_format float16 is 0.5, not a count"),
        (changed(1, "modules", 3, "tied", to=[]), 1, r"modules 3, tied is \[\], not an object"),
        (changed(1, "seed", to=3), 1, "'seed' is no field of it"),
        ('{"end": true}\n', 1, "it has schema None"),
        ('{"schema": 1\n{}\n', 1, "it is not JSON"),
        ("[]\n", 1, "not an object"),
        ("", 1, "no whole first line"),
        (changed(2, "step", to=1) + "{}\n", 5, "the line before it ends the file"),
        (changed(2, "step", to=1).replace('"step": 1,', '"step": NaN,'), 2, "NaN is no number of JSON"),
    ):
        path.write_text(text)
        with pytest.raises(StateError, match=rf"(?s)where  .*evidence\.jsonl, line {line}\n.*{words}"):
            read_evidence(path)
    for wrong, words in ((tmp_path / "no", "there is no evidence here"), (tmp_path, "not JSON")):
        with pytest.raises(StateError, match=words):
            read_evidence(wrong)
