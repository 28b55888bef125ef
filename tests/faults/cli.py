"""Faults of the command line, and what `mezzo doctor` finds."""

from .fault import in_file

# fmt: off
FAULTS = (
    *in_file("checkup.py",
        ("doctor: weights that are NaN are right", "not self.weights_error <= self.tolerance",
         "self.weights_error > self.tolerance", "tests/test_checkup.py::test_a_loss_that_is_not_fp32_s_is_wrong",
         "a format that trains to NaN would be said to work"),
        ("doctor: weights are compared with themselves", "weights_error=float((run.end - fp32.end).norm() / way)",
         "weights_error=float((run.end - run.end).norm() / way)",
         "tests/test_checkup.py::test_wrong_products_are_found",
         "products that are a tenth off would be said to work"),
        ("doctor: a dead child has worked", "        return Checkup(device=device, dtype=dtype, trouble=ended)\n",
         "        return Checkup(device=device, dtype=dtype)\n",
         "tests/test_checkup.py::test_a_child_that_dies_is_reported_and_nothing_else_dies",
         "a format that kills its process would be said to work"),
    ),
    *in_file("cli/doctor.py",
        ("doctor: a dead format weighs more than a wrong one", 'ALERT if "wrong" in statuses else UNSUPPORTED',
         'UNSUPPORTED if "failed" in statuses else ALERT',
         "tests/cli/test_cli_doctor.py::test_what_is_wrong_weighs_more_than_what_died",
         "a script would take wrong numbers for a device without the format"),
        ("doctor: each family does what the first does", "WHAT_MEZZO_DOES[actions[family]]",
         'WHAT_MEZZO_DOES[actions["products"]]',
         "tests/cli/test_cli_doctor.py::test_each_family_has_a_row_which_says_what_is_done_about_it",
         "nobody would see that convolutions are emulated"),
    ),
)
