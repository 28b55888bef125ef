"""Faults of the probe, and of what follows from its answers."""

from .fault import Fault, in_file

FAULTS: tuple[Fault, ...] = (
    *in_file(
        "cast/device/child.py",
        (
            "probe: a NaN is right",
            "if not off <= TOLERANCE * torch.finfo(dtype).eps:",
            "if off > TOLERANCE * torch.finfo(dtype).eps:",
            "tests/cast/test_probing.py::test_a_product_that_is_further_from_fp32s_than_rounding_is_wrong",
            "a kernel that computes NaN would train",
        ),
        (
            "probe: only outputs are compared",
            "return [output.detach(), *torch.autograd.grad(output, leaves, slope.to(device, dtype))]",
            "return [output.detach()]",
            "tests/cast/test_probing.py::test_a_backward_pass_that_is_wrong_counts",
            "gradients that are wrong would train",
        ),
    ),
    *in_file(
        "cast/device/probing.py",
        (
            "probe: accidents are kept",
            'if support.status != "unknown"}',
            "}",
            "tests/cast/test_probing.py::test_a_child_that_says_nothing_is_asked_again_by_the_next_process",
            "a machine that was busy once would emulate for ever",
        ),
        (
            "probe: the user's limit reaches the first child",
            "if key not in (ISA_VARIABLE,",
            "if key not in (",
            "tests/cast/test_probing.py::test_under_the_users_own_limit_a_death_stays_one",
            "a limit that Python sets too late would hide the death of this process",
        ),
    ),
    *in_file(
        "cast/device/decide.py",
        (
            "probe: the limit is set and not read",
            "    torch.ops.mkldnn._is_mkldnn_bf16_supported()\n",
            "",
            "tests/cast/test_trap.py::test_an_environment_that_is_put_back_does_not_take_the_limit_away",
            "a test that puts the environment back would take the protection with it",
        ),
        (
            "probe: a limit that came too late stays",
            "        del os.environ[ISA_VARIABLE]\n",
            "        pass\n",
            "tests/cast/test_device.py::test_where_the_limit_comes_too_late_it_is_taken_back_and_one_warning_says_so",
            "processes that this one starts would be limited, and the next decision would take it for the user's",
        ),
        (
            "probe: the user's limit is overridden",
            "    limit = own or probing.ISA_LIMIT\n    if own is None:\n",
            "    limit = probing.ISA_LIMIT\n    if True:\n",
            "tests/cast/test_device.py::test_a_limit_of_the_users_own_is_tried_and_never_overridden",
            "a user could not limit oneDNN further",
        ),
    ),
    *in_file(
        "checkup.py",
        (
            "doctor: weights that are NaN are right",
            "not self.weights_error <= self.tolerance",
            "self.weights_error > self.tolerance",
            ("tests/cli/test_cli_doctor.py", "tests/test_checkup.py"),
            "a format that trains to NaN would be said to work",
        ),
        (
            "doctor: weights are compared with themselves",
            "weights_error=float((run.end - fp32.end).norm() / way)",
            "weights_error=float((run.end - run.end).norm() / way)",
            "tests/test_checkup.py::test_wrong_products_are_found",
            "products that are a tenth off would be said to work",
        ),
        (
            "doctor: a dead child has worked",
            "        return Checkup(device=device, dtype=dtype, trouble=ended)\n",
            "        return Checkup(device=device, dtype=dtype)\n",
            "tests/test_checkup.py::test_a_child_that_dies_is_reported_and_nothing_else_dies",
            "a format that kills its process would be said to work",
        ),
    ),
    *in_file(
        "cli/doctor.py",
        (
            "doctor: a dead format weighs more than a wrong one",
            'ALERT if "wrong" in found else UNSUPPORTED',
            'UNSUPPORTED if "failed" in found else ALERT',
            "tests/cli/test_cli_doctor.py::test_what_is_wrong_weighs_more_than_what_died",
            "a script would take wrong numbers for a device without the format",
        ),
    ),
)
