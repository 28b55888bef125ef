"""What of a script's run is recorded by itself: products below sixteen bits, and no other run."""

import torch
from torch import nn

from mezzo.policy import Policy
from mezzo.script import operand_records
from mezzo.script.operand_records import OperandLog


def test_a_run_without_products_below_sixteen_bits_has_no_recorder(monkeypatch):
    made, plain = [], operand_records.Recorder

    def recorder(model, **options):
        made.append(model)
        return plain(model, **options)

    monkeypatch.setattr(operand_records, "Recorder", recorder)
    small, large = nn.Linear(16, 16), nn.Linear(16, 32)
    for policy, recorded in (("O1,bf16", []), ("O1,bf16,fp8_module=*", [large])):
        made.clear()
        log = OperandLog(Policy.parse(policy))
        with log.around([small, large]):
            large(torch.ones(1, 16))
        assert made == recorded, policy
        assert log.losses == []
