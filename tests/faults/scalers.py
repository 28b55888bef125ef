"""Faults of scalers that frameworks and programs call: the engine's verbs as a ``GradScaler``."""

from .fault import Fault, in_file

_FAULTS_OF_TORCH = "tests/compat/test_torch_faults.py::"
_BESIDE_TORCH = "tests/compat/test_torch_grad_scaler.py::"

FAULTS: tuple[Fault, ...] = (
    *in_file(
        "compat/torch/grad_scaler.py",
        (
            "scaler: gradients are divided by the scale of now",
            "window.take(self._given)",
            "window.take(self.loss_scale.state.scale)",
            _FAULTS_OF_TORCH + "test_gradients_are_unscaled_by_the_scale_that_they_were_made_with",
            "gradients that wait while the scale grows would be half as large",
        ),
        (
            "scaler: what no step has taken does not count",
            "if window.passes and window.found is not None:",
            "if False:",
            _BESIDE_TORCH + "test_a_step_that_the_user_leaves_out",
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
            _FAULTS_OF_TORCH + "test_fp16_gradients_are_refused_with_parameter_cause_and_cure",
            "small gradients would be flushed to zero",
        ),
        (
            "scaler: Ctrl-C makes a step uncounted",
            "with uninterrupted(), self._once(optimizer):",
            "with self._once(optimizer):",
            _FAULTS_OF_TORCH + "test_a_signal_at_each_fourth_line_of_a_first_step_leaves_it_whole_or_to_be_taken_again",
            "a step that was taken would be taken again",
        ),
        (
            "scaler: a signal leaves an optimizer half known",
            "        with uninterrupted():\n            if engine is None:",
            "        if True:\n            if engine is None:",
            _FAULTS_OF_TORCH + "test_a_signal_at_each_fourth_line_of_a_first_step_leaves_it_whole_or_to_be_taken_again",
            "a loop that goes on after Ctrl-C would end in an error of mezzo's own",
        ),
        (
            "scaler: optimizers are kept for ever",
            "engine.weights.know([*(each for each in self._seen if",
            "engine.weights.know([*(each for each in engine.weights.optimizers if",
            _FAULTS_OF_TORCH + "test_optimizers_of_earlier_iterations_are_let_go",
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
    *in_file(
        "session/scaler.py",
        (
            "scaler: evaluations keep the scale",
            "            losses.append(closure())\n            self._open(optimizer)\n",
            "            losses.append(closure())\n",
            _FAULTS_OF_TORCH + "test_closures_of_optimizers_that_evaluate_as_often_as_they_like",
            "LBFGS would search along gradients 65536 times too large",
        ),
        (
            "scaler: SAM begins with scaled gradients",
            "        self._open(optimizer, again=False)  # SAM begins with these\n",
            "",
            _FAULTS_OF_TORCH + "test_gradients_before_a_closure_are_an_evaluation_of_their_own",
            "the first half of its step would be 65536 times too far",
        ),
        (
            "scaler: what a step is given is lost",
            "(taken_over or optimizer.step)(*args, **kwargs)",
            "(taken_over or optimizer.step)()",
            _FAULTS_OF_TORCH + "test_step_hands_on_what_it_is_given_and_returns_what_it_gets",
            "options of an optimizer's own step would have no effect",
        ),
    ),
    *in_file(
        "session/window.py",
        (
            "window: what a step has left is divided again",
            "is_new = not self.has_left_alone()",
            "is_new = True",
            _FAULTS_OF_TORCH + "test_what_a_step_has_left_is_not_divided_again",
            "steps 65536 times too small",
        ),
        (
            "window: another optimizer of the weights forgets an overflow",
            "self.found = None if is_new else self._skipped",
            "self.found = None",
            _FAULTS_OF_TORCH + "test_an_overflow_that_one_has_found_skips_another_optimizer_of_the_same_weights",
            "it would train on infinities that were cleaned to numbers",
        ),
        (
            "window: parameters that took others' places in a group are not seen",
            'key = [list(map(id, group["params"])) for each',
            'key = [len(group["params"]) for each',
            _FAULTS_OF_TORCH + "test_a_parameter_that_took_anothers_place_in_its_group_is_unscaled_and_judged",
            "its gradient would be 65536 times too large, and its infinities would train",
        ),
        (
            "window: a program's own dtype of gradients is lost",
            "                leaf.grad_dtype = dtype\n",
            "                pass\n",
            "tests/compat/test_paddle_decorate.py::test_master_grad",
            "from the second step on micro-batches would be summed in sixteen bits",
        ),
    ),
    *in_file(
        "session/update.py",
        (
            "update: what fused kernels have divided is divided again",
            "if not set(window.optimizers).isdisjoint(divided):",
            "if False:",
            _FAULTS_OF_TORCH + "test_optimizers_that_share_weights_divide_by_the_scale_once",
            "the second optimizer of the same weights would take steps 65536 times too small",
        ),
        (
            "update: a user's own scale does not count",
            'if (own_scale := getattr(told, "grad_scale", None)) is not None:',
            "if (own_scale := None) is not None:",
            _FAULTS_OF_TORCH + "test_a_scale_of_the_users_own_counts_besides_as_in_torch",
            "gradients would stay that much too large",
        ),
    ),
)
