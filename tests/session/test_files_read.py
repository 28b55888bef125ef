"""mezzo.load: what it hands out is what was saved, bit for bit, or it raises."""

import io
import os
import pickle
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mezzo
from mezzo import StateError

STATE = {"weight": torch.arange(5.0), "half": torch.tensor([1.5, 0.0]).half(), "step": 3, "names": ["a", "b"]}


def bits(state):
    """Everything a state says, as plain values that compare exactly."""
    if isinstance(state, torch.Tensor):
        return str(state.dtype), state.shape, state.contiguous().view(torch.uint8).tolist()
    if isinstance(state, dict):
        return {key: bits(value) for key, value in state.items()}
    return [bits(value) for value in state] if isinstance(state, list) else state


@pytest.fixture
def path(tmp_path):
    mezzo.save(tmp_path / "last.pt", **STATE)
    return tmp_path / "last.pt"


def saved(state=STATE, **options):
    file = io.BytesIO()
    torch.save(state, file, **options)
    return file.getvalue()


def loaded(path, expected):
    """Load a damaged file: what is raised, or "the same"."""
    try:
        found = mezzo.load(path)
    except StateError as error:
        return str(error)
    except Exception as error:  # torch's: the records are whole, and some have other names
        return f"torch cannot read it\n  where  {path}\n  why    {error}"
    assert bits(found) == expected
    return "the same"


def outcome(path, data, expected=None):
    path.write_bytes(data)
    return loaded(path, expected).partition("\n")[0]


def test_what_was_saved_is_loaded(path):
    assert bits(mezzo.load(path)) == bits(mezzo.load(str(path))) == bits(STATE)
    path.write_bytes(saved())  # by torch itself
    assert bits(mezzo.load(path)) == bits(STATE)


@pytest.mark.parametrize("step", [8, pytest.param(1, marks=pytest.mark.slow)], ids=["one of each byte", "all"])
def test_every_flipped_bit_is_told_or_changes_nothing(tmp_path, step):
    """In the data and in all that says where it lies; of padding, which is the letter Z, one bit of each byte."""
    state = {"weight": torch.arange(5.0), "step": 3}
    path = tmp_path / "last.pt"
    mezzo.save(path, **state)
    whole, expected = path.read_bytes(), bits(state)
    told = Counter()
    with path.open("r+b", buffering=0) as file:
        for at, byte in enumerate(whole):
            padding = whole[at - 1 : at + 2] == b"ZZZ"
            for bit in (at % 8,) if padding else range(at % step, 8, step):
                file.seek(at)
                file.write(bytes([byte ^ 1 << bit]))
                found = loaded(path, expected)
                told[found.partition("\n")[0]] += 1
                assert found == "the same" or (f"\n  where  {path}\n  why    " in found and not padding)
            file.seek(at)
            file.write(bytes([byte]))
    for name, size in (("data/0", 20), ("data.pkl", 100), ("byteorder", 6)):
        assert told[f"the record 'archive/{name}' of the checkpoint is damaged"] > 8 / step * size
    assert sum(number for words, number in told.items() if words != "the same") > 8 / step * 180
    assert told["the same"] > 300


def test_a_record_that_one_bit_calls_a_folder_is_damaged(path):
    """Of such a record torch hands out memory as it finds it."""
    data = bytearray(path.read_bytes())
    name = b"archive/data/0"
    entry = data.rindex(name) - 46  # of the central directory
    assert data[entry : entry + 4] == b"PK\x01\x02"
    data[entry + 38] |= 0x10  # the folder bit of its external attributes
    assert outcome(path, bytes(data)) == "the record 'archive/data/0' of the checkpoint is damaged"


def test_torch_loads_such_a_file(path):
    """What the checksum is for; when torch looks at it, this test will say so."""
    whole = path.read_bytes()
    at = whole.index(STATE["weight"].numpy().tobytes())
    path.write_bytes(whole[: at + 2] + b"\x40" + whole[at + 3 :])
    assert not torch.equal(torch.load(path, weights_only=True)["weight"], STATE["weight"])
    with pytest.raises(StateError, match=r"the record 'archive/data/0' of the checkpoint is damaged") as caught:
        mezzo.load(path)
    assert str(path) in str(caught.value)


LARGER = {f"layer{n}.weight": torch.randn(40, 30, generator=torch.Generator().manual_seed(n)) for n in range(8)}
LARGER_BYTES = saved(LARGER)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(LARGER_BYTES) - 1), st.integers(1, 255)), min_size=1, max_size=5))
def test_damage_of_a_larger_file(tmp_path_factory, harms):
    data = bytearray(LARGER_BYTES)
    for at, mask in harms:
        data[at] ^= mask
    outcome(tmp_path_factory.mktemp("larger") / "x.pt", bytes(data), bits(LARGER))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, len(LARGER_BYTES) - 1), st.integers(1, 5000), st.sampled_from(["zeros", "cut out", "twice"]))
def test_damage_of_whole_pieces(tmp_path_factory, begin, length, kind):
    piece = LARGER_BYTES[begin : begin + length]
    other = {"zeros": bytes(len(piece)), "cut out": b"", "twice": piece + piece}[kind]
    data = LARGER_BYTES[:begin] + other + LARGER_BYTES[begin + length :]
    outcome(tmp_path_factory.mktemp("larger") / "x.pt", data, bits(LARGER))


def test_a_file_cut_short_or_with_something_behind_it(path):
    whole = path.read_bytes()
    for length in (*range(4, len(whole), 7), len(whole) - 1):
        assert outcome(path, whole[:length], None).startswith("the checkpoint is damaged")
    path.write_bytes(b"")
    with pytest.raises(StateError):
        mezzo.load(path)


class Program:
    def __reduce__(self):
        return os.getpid, ()


def test_what_is_no_weight_is_refused_unless_it_is_asked_for(path):
    mezzo.save(path, weight=torch.zeros(1), program=Program())
    with pytest.raises(pickle.UnpicklingError, match="posix"):
        mezzo.load(path)
    assert mezzo.load(path, weights_only=False)["program"] == os.getpid()


def test_where_tensors_go(path):
    assert mezzo.load(path, map_location="meta")["weight"].device.type == "meta"


def test_only_regular_files_are_read(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"missing\.pt"):
        mezzo.load(tmp_path / "missing.pt")
    with pytest.raises(IsADirectoryError, match="this is a folder"):
        mezzo.load(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    for place, kind in ((tmp_path / "pipe", "pipe"), ("/dev/null", "device"), ("/dev/zero", "device")):
        with pytest.raises(OSError, match=f"this is a {kind}"):
            mezzo.load(place)
    with pytest.raises(TypeError):
        mezzo.load(io.BytesIO(saved()))


def test_checksums_are_written_whatever_other_files_have(path):
    torch.serialization.set_crc32_options(False)
    try:
        mezzo.save(path, **STATE)
        assert torch.serialization.get_crc32_options() is False
        theirs = saved()
    finally:
        torch.serialization.set_crc32_options(True)
    assert bits(mezzo.load(path)) == bits(STATE)
    assert outcome(path, theirs, None).endswith("is damaged")


def test_loading_goes_on_where_saving_stopped(tmp_path):
    def session():
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = mezzo.optim.AdamW(model.parameters(), lr=0.1)
        return model, optimizer, mezzo.MixedPrecision(model, optimizer, "O2,dtype=bfloat16,emulate=true")

    parts = session()
    with parts[2].autocast():
        loss = parts[0](torch.ones(4, 3)).sum()
    parts[2].backward(loss)
    parts[2].step()
    mezzo.save(tmp_path / "last.pt", states=[part.state_dict() for part in parts])
    others = session()
    for part, state in zip(others, mezzo.load(tmp_path / "last.pt")["states"], strict=True):
        part.load_state_dict(state)
    for mine, theirs in zip(parts[2].master_params(), others[2].master_params(), strict=True):
        assert torch.equal(mine, theirs)
