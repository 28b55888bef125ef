"""Faults of the plan of a session: each thing that it is told of, or asks, is left out once."""

from .fault import in_file

TOLD = "tests/session/test_plan_is_told.py"

# fmt: off
FAULTS = (
    *in_file("session/step_plan.py",
        ("plan: weights that are stored otherwise are not seen", "            and list(map(type, params)) == self.kinds\n",
         "", TOLD, "gradients of FP32 parameters would be summed in 16 bits"),
        ("plan: parameters of another dtype are not seen", "else list(map(Tensor.element_size, params)) == self.sizes", "else True",
         TOLD, "micro-batches of 16-bit parameters would be summed in 16 bits"),
        ("plan: a hook before a step is not seen", "                deciding(optimizers) == self.deciding\n", "                True\n",
         TOLD, "a program's own code before a step would see gradients with the loss scale"),
        ("plan: a wrapper that came later is not seen", "            and is_wrapped is self.is_wrapped\n", "",
         ("tests/distributed/test_ddp.py", "tests/acceptance/test_machine.py::test_sequences"),
         "buckets of DistributedDataParallel would be given gradients of another dtype"),
    ),
    *in_file("session/engine.py",
        ("plan: no step asks whether it is current", '        self.replan(writes=call == "step")\n', "", TOLD,
         "a parameter that was added between a pass and its step would not be checked"),
        ("plan: no pass of a plain loop, or by a scaler, asks whether it is current",
         "        self.replan()\n        windows, reached_ids = list", "        windows, reached_ids = list", TOLD,
         "new parameters would train on gradients that carry the scale"),
        ("plan: what joins an open window keeps its gradient", "                carry_over(leaf, old_carried.get(leaf), new_carried.get(leaf))\n",
         "                pass\n", TOLD, "a gradient of before would be divided by a scale that it never had"),
    ),
    *in_file("session/session.py",
        ("plan: no pass of the five lines asks whether it is current", "        engine.replan()\n        windows = engine.windows\n",
         "        windows = engine.windows\n", TOLD, "gradients of new parameters would be divided by a scale they never had"),
    ),
    *in_file("session/closures.py",
        ("plan: no step with a closure asks whether it is current", "    engine.replan(writes=True)\n", "",
         TOLD, "gradients of two optimizers that have come to share a parameter would be stepped with again"),
    ),
    *in_file("session/grad_scaler.py",
        ("plan: a scaler over a session tells nothing", "        engine_of(amp).plan_anew()\n", "",
         TOLD,
         "gradients of a framework's loop would have 16 bits"),
    ),
    *in_file("compat/torch/grad_scaler.py",
        ("plan: a scaler does not ask whether it is current", "        engine.replan()\n", "",
         "tests/compat/test_torch_faults.py", "a parameter that took another's place would have scaled gradients"),
    ),
)
