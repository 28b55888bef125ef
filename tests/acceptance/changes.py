"""A session goes on under another policy, in the middle of a run."""

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

import mezzo

from .drivers import DRIVERS
from .loop import PRODUCTS, SCALES, Loop
from .near import rounded
from .subject import LOW
from .twins import OFF, rule

#: Whose sessions have ``change``, and no graph of their own.
STYLES = ("five lines", "attach")
policies = st.fixed_dictionaries(
    {
        "level": st.sampled_from(["O2", "O1", "O0", "O3"]),
        "dtype": st.sampled_from(LOW),
        "pinned": st.booleans(),
        "scale": st.sampled_from(SCALES),
        "products": st.sampled_from(PRODUCTS),
    }
)


class Changes(Loop):
    """``amp.change(policy)``: the same values, moments and counts, and a scale that goes on if there is one."""

    @rule(policy=policies, keeps=st.booleans())
    def change(self, policy, keeps):
        """To another policy, or with ``keeps`` to another scale alone."""
        config = replace(self.config, **({"scale": policy["scale"]} if keeps else policy))
        config = DRIVERS[config.style].suited(config)
        enters_o3 = config.level == "O3" != self.config.level
        if config.style not in STYLES or not config.is_promised:
            return
        if enters_o3 and (self.tape is not None or config.is_twin or config.library != "mezzo"):
            return  # a tie rounds by bits that FP16 halves do not keep; and torch's optimizers keep their FP32 states
        if self.oracle.is_open:
            self.refused(lambda: self.amp.change(config.policy), "inside an accumulation window")
            return
        self.clear("session")
        if mezzo.Policy.of(config.policy) == self.amp.policy:
            bits = self.subject.bits()
            self.amp.change(config.policy)
            assert self.subject.bits() == bits
            return
        self.oracle.commit()
        before = {name: self.subject.exact(name) for name in self.oracle.weights}
        models = [param for _, param in self.subject.model.named_parameters()]
        self.amp.change(config.policy)
        assert all(new is old for new, old in zip(self.subject.model.parameters(), models, strict=True))
        self.subject.config, self.driver.config = config, config
        self.begun_at = "O3" if enters_o3 else self.begun_at
        self.off = max(self.off, OFF[config.dtype])
        for name, weight in self.oracle.weights.items():
            weight.dtype, weight.form, weight.half = config.stored(name)
            exact, expected = self.subject.exact(name), rounded(before[name], weight.dtype)
            assert (np.abs(exact - expected) <= weight.grid).all(), f"{name} after a change: {exact} was {before[name]}"
            weight.exact = exact
        self.oracle.scale = self.oracle.scale.under(self.driver.scale(config))
        self.is_planned()

    change_ = change
