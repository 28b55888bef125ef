"""Faults of weights in two halves: their owner, what models show, FP32 views, and how values are exchanged."""

from .fault import Fault, in_file

_HALVES = "tests/weights/test_halves.py::"
_MODELS = "tests/weights/test_models.py::"
_VIEWS = "tests/weights/test_views.py::"
_BY_HAND = "tests/weights/test_optimizers.py::test_weights_and_state_are_those_of_masters_kept_by_hand"

_OWNER = in_file(
    "weights/halves.py",
    (
        "halves: a refused weight is told after others were stored",
        "        refuse_beyond([(local(t.detach()), dtype) for t, dtype in dtypes.items() if t.dtype != dtype])\n",
        "        pass\n",
        _HALVES + "test_a_refused_weight_leaves_all_others_as_they_were",
        "an FP16 weight beyond 65504 would be infinite",
    ),
    (
        "halves: what another model has stored is stored again",
        "                self._held[tensor] = known[tensor]\n                continue\n",
        "                pass\n",
        _HALVES + "test_models_that_share_a_tensor_read_and_give_back_one_value",
        "of two models that share a weight one would have another value",
    ),
    (
        "halves: low weights are given back",
        "give_back(tensor, self.read(tensor).to(held.before))",
        "give_back(tensor, tensor.detach().to(held.before))",
        _HALVES + "test_bf16_gives_every_bit_back",
        "close() would lose sixteen bits of every weight",
    ),
    (
        "halves: a written rest is not written",
        "encode_into(local(value), local(tensor.data), self.rest_of(tensor))",
        "encode_into(local(value), local(tensor.data), self.rest_of(tensor).clone())",
        _HALVES + "test_a_written_value_is_read_back_in_the_same_memory",
        "what is loaded would be wrong in its lower half",
    ),
    (
        "halves: a low value cuts FP32 ones off",
        "torch.where(is_same, exact, value.to(torch.float32))",
        "value.to(torch.float32)",
        (_HALVES + "test_a_low_value_leaves_the_fp32_value_of_elements_that_hold_it", "tests/session/test_state.py"),
        "the order in which model and session are loaded would matter",
    ),
    (
        "halves: a write is not counted",
        "        increment_version(tensor)\n",
        "",
        _HALVES + "test_a_written_value_is_read_back_in_the_same_memory",
        "autograd would take a weight that was loaded in the middle of a pass for the one before",
    ),
    (
        "halves: a buffer keeps the rest of another value",
        "            held.rest.zero_()\n            held.version = tensor._version\n        return",
        "            held.version = tensor._version\n        return",
        _HALVES + "test_a_buffer_that_is_written_since_is_what_it_holds",
        "counters and running means in buffers would be off by half a spacing",
    ),
    (
        "halves: what is swapped in has the own rest",
        "                    held.rest = rest\n",
        "                    pass\n",
        _HALVES + "test_other_memory_is_seen_while_it_is_there_and_the_own_one_has_its_value_again",
        "an average that is swapped in would be evaluated, and saved, with other lower halves",
    ),
    (
        "halves: the own memory comes back with another rest",
        "held.memory, held.rest = next((each for each in held.left if each[0] == now), before)",
        "held.memory = now",
        (
            _HALVES + "test_other_memory_is_seen_while_it_is_there_and_the_own_one_has_its_value_again",
            _MODELS + "test_shadows_that_are_swapped_in_for_an_evaluation_leave_no_trace",
        ),
        "each evaluation of an average would move the weights that train",
    ),
    (
        "halves: a swap back is seen a step late",
        "        if held.left:\n            self.settle()\n",
        "",
        _HALVES + "test_the_own_memory_has_its_value_again_at_once",
        "a checkpoint after an evaluation of an average would be wrong in its lower half",
    ),
    (
        "halves: a saved rest is forgotten",
        "        self.rest_of(tensor).copy_(local(rest))\n",
        "",
        (_HALVES + "test_a_saved_rest_goes_beside_what_is_there", "tests/session/test_state.py"),
        "a resumed run would begin from low weights",
    ),
    (
        "halves: another shape is broadcast",
        "        if value.shape != tensor.shape:\n",
        "        if False:\n",
        _HALVES + "test_what_cannot_be_stored_is_refused_and_nothing_is_changed",
        "one number would fill a whole weight",
    ),
)

_SHOWN = in_file(
    "weights/models.py",
    (
        "models: tied keys are two tensors",
        "                if tensor not in shown:\n",
        "                if True:\n",
        _MODELS + "test_a_state_dict_holds_fp32_values_and_tied_ones_once",
        "checkpoints of tied weights would be larger, and safetensors' would not be theirs",
    ),
    (
        "models: a state dict holds what another one held",
        "        if self._shown[0]() is not state:\n",
        "        if self._shown[0]() is None:\n",
        _MODELS + "test_two_state_dicts_at_two_times_hold_two_values",
        "the second checkpoint of a run would be the first one",
    ),
    (
        "models: what is assigned takes the parameter's place",
        "state[key] = tensor if assigns else tensor.detach()",
        "state[key] = tensor.detach()",
        _MODELS + "test_fp32_values_are_loaded_whole_into_the_same_objects_and_memory",
        "the optimizer would train parameters that the model no longer has",
    ),
    (
        "models: a loaded buffer's rest is taken for old",
        "halves.write(tensor, value, copies=not assigns)",
        "halves.write(tensor, value)",
        _MODELS + "test_fp32_values_are_loaded_whole_into_the_same_objects_and_memory",
        "buffers would lose sixteen bits each time that they are loaded",
    ),
    (
        "models: a state dict is refused half-way",
        "            raise_together(_unfit(module, halves, state, prefix))\n",
        "            pass\n",
        _MODELS + "test_what_does_not_fit_is_refused_before_anything_is_written",
        "some weights would be those of a checkpoint that was refused",
    ),
    (
        "models: a copy keeps hooks",
        "                del hooks[key]\n",
        "                pass\n",
        _MODELS + "test_a_copy_is_a_plain_fp32_model_which_trains_in_plain_torch",
        "a copy for evaluation would go on casting, and could not be loaded without mezzo",
    ),
    (
        "models: a copy is low",
        "                wide = owner.read(tensor)\n",
        "                wide = tensor.detach().clone()\n",
        _MODELS + "test_a_copy_is_a_plain_fp32_model_which_trains_in_plain_torch",
        "averages and teachers that begin as copies would have sixteen bits",
    ),
    (
        "models: copies unfreeze",
        "nn.Parameter(wide, tensor.requires_grad) if is_param",
        "nn.Parameter(wide) if is_param",
        _MODELS + "test_a_copy_is_a_plain_fp32_model_which_trains_in_plain_torch",
        "frozen parts of a copy would train",
    ),
    (
        "models: a cast passes unseen",
        "change(torch.empty(0, dtype=dtype)).dtype) != dtype:",
        "change(torch.empty(0, dtype=dtype)).dtype) == torch.float64:",
        _HALVES + "test_a_cast_of_a_converted_model_is_refused",
        "model.half() would put FP16 weights beside BF16's rests",
    ),
)

_STEPS = in_file(
    "weights/views.py",
    (
        "views: the last part is left out",
        "        self._take(parts[-1])\n",
        "        self._take(parts[0])\n",
        _BY_HAND,
        "of a large model the last parameters would never train, and the first twice",
    ),
    (
        "views: only the last part is stepped",
        "                step(optimizer)\n",
        "                pass\n",
        _BY_HAND,
        "of a large model the first parameters would never train",
    ),
    (
        "views: state stays behind",
        "                if (kept := state.pop(old, None)) is not None:\n                    state[new] = kept\n",
        "                pass\n",
        _BY_HAND,
        "each step would be the first one, without moments",
    ),
    (
        "views: the multiplier is lost",
        "        self.exchange.widen(raw, multiplier, found_inf)\n",
        "        self.exchange.widen(raw, None, found_inf)\n",
        _BY_HAND,
        "steps with gradients 1024 times too large",
    ),
    (
        "views: FP32 gradients are not multiplied",
        "                view.grad = view.grad * multiplier\n",
        "                pass\n",
        _VIEWS + "test_sparse_gradients_update_their_rows_in_fp32",
        "sparse gradients would carry the scale",
    ),
    (
        "views: an overflow is stored",
        "        self.exchange.store(shown, found_inf)\n",
        "        self.exchange.store(shown, None)\n",
        _BY_HAND,
        "a skipped step of a fused optimizer would store whatever its memory held",
    ),
    (
        "views: what was made at first stays low",
        "                    state.update({name: widened(value) for name, value in state.items()})\n",
        "                    pass\n",
        _VIEWS + "test_state_that_was_made_low_is_widened_and_stays_so",
        "Adagrad's sums of a model that came low would stay low",
    ),
    (
        "views: loaded state is cast",
        "        _exchange(self._loading, 2)\n        self._rekey(self._loading_pairs)\n",
        "        pass\n",
        _VIEWS + "test_a_run_that_is_resumed_goes_on_bit_for_bit",
        "moments would lose sixteen bits at each restart",
    ),
    (
        "views: a load that raises leaves its views",
        "            finally:\n                self._end_loading()\n",
        "            finally:\n                pass\n",
        _VIEWS + "test_a_load_that_raises_leaves_groups_and_state_as_they_were",
        "after a refused checkpoint the optimizer would train nothing",
    ),
    (
        "views: a step that raises leaves its views",
        "                    self._depth = 0\n                    self._close()\n",
        "                    self._depth = 0\n",
        _VIEWS + "test_a_step_that_raises_leaves_groups_and_state_as_they_were",
        "after an interrupt the optimizer would train views, and not the model",
    ),
    (
        "views: hooks before the step see views",
        "                pres.move_to_end(pre.id)\n",
        "                pass\n",
        _VIEWS + "test_hooks_of_a_program_see_the_models_parameters_before_and_after_a_step",
        "a hook that edits gradients would edit the model's, after these were read",
    ),
    (
        "views: hooks after the step see views",
        "                posts.move_to_end(post.id, last=False)\n",
        "                pass\n",
        _VIEWS + "test_hooks_of_a_program_see_the_models_parameters_before_and_after_a_step",
        "a hook that clips weights would clip what is about to be overwritten",
    ),
    (
        "views: a closure sees the weights before",
        "        def evaluate() -> Any:\n            self._close()\n",
        "        def evaluate() -> Any:\n",
        _VIEWS + "test_closures_see_low_weights_and_optimizers_fp32",
        "each evaluation of the loss would be that of the weights before",
    ),
    (
        "views: the state of inner optimizers stays behind",
        "        states = [each.state for each in _family(self.optimizer)]\n",
        "        states = [self.optimizer.state]\n",
        _VIEWS + "test_an_inner_optimizer_keeps_its_state_under_the_models_parameters",
        "checkpoints of what SAM wraps would hold no moments",
    ),
    (
        "views: an optimizer that writes beside is not told",
        "        if written:\n",
        "        if False:\n",
        _VIEWS + "test_an_optimizer_that_reaches_the_models_parameters_in_another_way_is_told_after_its_step",
        "its updates would be overwritten without a word",
    ),
    (
        "views: aliases are taken",
        "else _lies_in(part, memories)",
        "else False",
        _VIEWS + "test_an_optimizer_that_keeps_aliases_of_parameters_is_refused",
        "an optimizer that writes parameters through .data would train memory that no model has",
    ),
    (
        "views: any list holds parameters",
        "isinstance(each, Tensor) and owner_of(each, halves) is not None for each in value",
        "isinstance(each, Tensor) for each in value",
        _VIEWS + "test_an_optimizer_s_other_lists_are_its_own",
        "what an optimizer has noted in a step would be gone after it",
    ),
    (
        "views: low weights train alone",
        "            _refuse_alone(params, self._halves)\n",
        "",
        _VIEWS + "test_low_weights_of_another_model_are_not_trained_beside",
        "updates below half a unit in the last place would be lost",
    ),
    (
        "views: memory stays after the step",
        "            self.memory[0].resize_(0)\n            return is_here\n",
        "            return is_here\n",
        _VIEWS + "test_fourteen_bytes_a_parameter_are_kept_and_at_most_eighteen_needed_within_a_step",
        "22 bytes a parameter would be kept with AdamW",
    ),
    (
        "views: a plan outlives its gradients",
        "goes_in_parts, multiplies, kinds, list(map(_TRAINS, params)),",
        "goes_in_parts, multiplies, None, list(map(_TRAINS, params)),",
        _VIEWS + "test_gradients_that_come_and_go_are_stepped_with_where_they_are",
        "what trains since would never move",
    ),
)

_AROUND = (
    *in_file(
        "step/exchange.py",
        (
            "exchange: gradients take the weights' places",
            "return weight, (weight, gradient)",
            "return weight, (gradient, weight)",
            _BY_HAND,
            "an optimizer would take gradients for weights",
        ),
        (
            "exchange: the multiplier is not taken",
            "verdict.multiplier if multiplier is None else moved(multiplier, device, torch.float32),",
            "verdict.multiplier,",
            "tests/step/test_exchange.py",
            "steps with gradients that carry the scale",
        ),
        (
            "exchange: an overflow is stored",
            "found_inf=verdict.found_inf if found_inf is None else moved(found_inf, device, torch.bool).reshape(()),",
            "",
            "tests/step/test_exchange.py",
            "a skipped step of a fused optimizer would store whatever its memory held",
        ),
    ),
    *in_file(
        "session/session.py",
        (
            "session: averages are those of low weights",
            "plain(averaged, model if is_low else InFP32(model, amp.engine.weights.halves()))",
            "plain(averaged, model)",
            _MODELS + "test_averaged_models_average_fp32_values",
            "U9: an average would have sixteen bits",
        ),
    ),
    *in_file(
        "session/refusals.py",
        (
            "refusals: low weights train alone",
            "        and param.requires_grad\n        and param not in of.wide\n",
            "        and False\n",
            "tests/session/test_refusals.py",
            "updates below half a unit in the last place would be lost",
        ),
    ),
)

FAULTS: tuple[Fault, ...] = (*_OWNER, *_SHOWN, *_STEPS, *_AROUND)
