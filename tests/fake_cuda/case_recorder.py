"""A recorder on the fake device: one read in each recorded step, none in others, whatever the session."""

import pytest

from mezzo.numerics import Recorder

from .case_sessions import FIRST, Trained

CASES = [("O1 fp16", "AdamW", "accumulated"), ("O2 fp16", "fused AdamW", "unscaled")]


@pytest.mark.parametrize("policy, optimizer, way", CASES, ids=map(" / ".join, CASES))
def test_only_recorded_steps_read_and_each_of_them_once(machine, policy, optimizer, way):
    trained = Trained(policy, optimizer, way)
    for _ in range(FIRST):
        trained.step()
    with Recorder(trained.model, trained.optimizer, every=4) as recorder:
        for number in range(1, 10):
            with machine.watched() as record:
                trained.step()
            assert len(record.reads) == (number % 4 == 1), (number, record.reads)
            if number % 4 == 1:
                assert "watches.py" in record.reads[0], record.reads
    assert [step.step for step in recorder.evidence.steps] == [1, 5, 9]
