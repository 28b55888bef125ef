"""``change()`` of a session whose step is captured: three real steps, and another recording."""

import pytest

from ...support.refusals import bits
from .loops import Loop, batches, run

WALKS = (
    ("O2,bf16,emulate=true", "O2,bf16,emulate=true,fp32=gelu"),
    ("O2,bf16,emulate=true", "O1,bf16,emulate=true"),
    ("O1,bf16,emulate=true", "O2,fp16,emulate=true,loss_scale=dynamic(init=1024,interval=4,hysteresis=1)"),
    ("O2,fp16,emulate=true", "O2,bf16,emulate=true"),
)


@pytest.mark.parametrize("before, after", WALKS)
def test_a_captured_step_is_captured_again(before, after):
    """Rules alone move no address."""
    data, replays = batches(range(14), bad=(3, 12)), []

    def between(loop, number):
        if hasattr(loop, "graph"):
            replays.append(loop.graph.replays)
        if number == 5:
            loop.amp.change(after)

    plain, other = Loop(before), Loop(before)
    expected = run(plain, plain.train_step, data, between)
    assert bits(run(other, other.captured(), data, between)) == bits(expected)
    assert replays == [0, 0, 0, 1, 2, 3, 0, 0, 0, 1, 2, 3, 4, 5]


def test_a_change_inside_a_captured_step():
    class Changes(Loop):
        def train_step(self, x, y, boost):
            output = super().train_step(x, y, boost)
            self.amp.change("O1,bf16,emulate=true")
            return output

    loop = Changes()
    with pytest.raises(Exception, match="inside a captured step"):
        loop.captured()(*batches([0])[0])
    assert loop.amp.policy.level == "O2"
