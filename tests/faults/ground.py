"""Faults of the files beside the rooms."""

from .fault import in_file

FAULTS = (
    *in_file(
        "formats.py",
        (
            "formats: encode cuts off",
            "steps = round(math.ldexp(",
            "steps = int(math.ldexp(",
            "tests/test_formats.py",
            "the reference of all rounding would round towards zero",
        ),
        (
            "formats: the largest number overflows",
            "rounded.masked_fill_(rounded > self.max",
            "rounded.masked_fill_(rounded >= self.max",
            "tests/test_formats.py",
            "65504 would be infinite",
        ),
        (
            "formats: float64 is rounded twice",
            "once = source.dtype != torch.float64 or self.dtype == torch.float32",
            "once = True",
            "tests/test_formats.py",
            "torch casts float64 to FP16 through FP32",
        ),
        (
            "formats: zeros count as underflow",
            "(zero, gone & ~zero, small",
            "(zero, gone, small",
            "tests/test_formats.py",
            "coverage would blame the format for zeros",
        ),
    ),
    *in_file(
        "files.py",
        (
            "files: no sync before the rename",
            "            os.fsync(file.fileno())\n",
            "",
            "tests/test_files.py",
            "R5: a crash would leave a checkpoint of zeros under the right name",
        ),
        (
            "files: a partial is readable by all",
            "0o666 if old is None else 0o600",
            "0o666",
            "tests/test_files.py",
            "R13: a private checkpoint would be readable while it is written",
        ),
        (
            "files: a device is replaced",
            "    if not stat.S_ISREG(mode):\n        why",
            "    if False:\n        why",
            "tests/test_files.py::test_what_is_no_file_is_not_replaced_by_one",
            "R6: saving to /dev/null as root would replace the device",
        ),
        (
            "files: what is half written stays",
            "            os.unlink(beside)\n",
            "            pass\n",
            "tests/test_files.py::test_an_error_in_the_block_leaves_the_old_file",
            "each error while saving would leave gigabytes under a hidden name",
        ),
        (
            "files: anybody's cache is trusted",
            "or stat.S_IMODE(facts.st_mode) & 0o077",
            "",
            "tests/test_files.py",
            "R4: another user's machine code would be loaded",
        ),
        (
            "files: the cache is for all",
            "    folder.chmod(0o700)\n",
            "",
            "tests/test_files.py",
            "R4: another user could put machine code there",
        ),
    ),
)
