"""Faults of ``compat/``."""

from .fault import in_file

FAULTS = (
    *in_file(
        "compat/torch/grad_scaler.py",
        (
            "scaler: gradients are divided by the scale of now",
            "window.take(self._given)",
            "window.take(self.loss_scale.state.scale)",
            "tests/compat/test_torch_faults.py::test_gradients_are_unscaled_by_the_scale_that_they_were_made_with",
            "gradients that wait while the scale grows would be half as large",
        ),
        (
            "scaler: what no step has taken does not count",
            "if window.passes and window.found is not None:",
            "if False:",
            "tests/compat/test_torch_grad_scaler.py::test_a_program_comes_to_the_same",
            "a loop that leaves a step out by the norm it has seen would overflow for ever",
        ),
        (
            "scaler: what no step has taken counts on one rank",
            "engine.tell(engine.ranks.agree(window.found, no, step=engine.account.begun + 1)[0])",
            "engine.tell(window.found)",
            "tests/distributed/test_torch_scaler_on_ranks.py",
            "loss scales would drift apart",
        ),
        (
            "scaler: it steps twice with the same gradients",
            "if has_stepped or (",
            "if (",
            "tests/compat/test_refusals.py",
            "what was added to used gradients would be taken for unscaled",
        ),
        (
            "scaler: FP16 gradients are unscaled low",
            "if not takes_flags(optimizer):",
            "if False:",
            "tests/compat/test_torch_faults.py::test_fp16_gradients_are_refused_with_parameter_cause_and_cure",
            "small gradients would be flushed to zero",
        ),
        (
            "scaler: Ctrl-C makes a step uncounted",
            "with uninterrupted(), self._once(optimizer):",
            "with self._once(optimizer):",
            "tests/compat/test_torch_faults.py::test_a_signal_at_each_fourth_line_of_a_first_step_leaves_it_whole_or_to_be_taken_again",
            "a step that was taken would be taken again",
        ),
        (
            "scaler: a signal leaves an optimizer half known",
            "        with uninterrupted():\n            if engine is None:",
            "        if True:\n            if engine is None:",
            "tests/compat/test_torch_faults.py::test_a_signal_at_each_fourth_line_of_a_first_step_leaves_it_whole_or_to_be_taken_again",
            "a loop that goes on after Ctrl-C would end in an error of mezzo's own",
        ),
        (
            "scaler: optimizers are kept for ever",
            "engine.weights.know([*(each for each in self._seen if",
            "engine.weights.know([*(each for each in engine.weights.optimizers if",
            "tests/compat/test_torch_faults.py::test_optimizers_of_earlier_iterations_are_let_go",
            "the moments of each optimizer there ever was would stay in memory",
        ),
    ),
    *in_file(
        "compat/paddle/grad_scaler.py",
        (
            "scaler: Paddle's constant scale moves",
            "self.loss_scale.state.scale if new_scale is None and not self._is_dynamic else new_scale",
            "new_scale",
            "tests/compat/test_paddle_grad_scaler.py",
            "a scale that was to stay would fall",
        ),
        (
            "scaler: Paddle's loss overflows as it is scaled",
            "var.float() if isinstance(var, Tensor) and var.dtype in LOW else var",
            "var",
            "tests/compat/test_paddle_grad_scaler.py::test_a_loss_in_sixteen_bits_is_scaled_in_fp32",
            "an FP16 loss times 65536 is infinite: no step would ever be taken",
        ),
    ),
)
