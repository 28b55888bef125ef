"""What importing mezzo does, and leaves alone: one process that has imported torch alone."""

import json
import os
import subprocess
import sys
import textwrap

PROGRAM = """
    import json, os, subprocess, sys, torch
    before, modules = dict(os.environ), set(sys.modules)
    threads, state = torch.get_num_threads(), torch.get_rng_state()

    def refuse(*arguments, **keywords):
        raise SystemExit(f"called at import: {arguments}")

    subprocess.Popen.__init__ = torch.cuda.is_available = torch.accelerator.current_accelerator = refuse
    if hasattr(os, "fork"):
        os.fork = refuse
    import mezzo
    added = [sorted(set(sys.modules) - modules)]
    assert dir(mezzo) == sorted(mezzo.__all__)
    import mezzo.cast.device, mezzo.step.executors.triton
    mezzo.integrations
    added.append(sorted(set(sys.modules) - modules))
    assert dict(os.environ) == before
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.cuda.is_initialized()
    # oneDNN has not looked at its environment either, else it would not obey now.
    os.environ["ONEDNN_MAX_CPU_ISA"] = "SSE41"
    assert not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    print(json.dumps(added))
"""


def test_importing_is_light_starts_nothing_sets_nothing_and_touches_no_device(tmp_path):
    """Beside torch, which takes seconds, nothing but mezzo's own files and parts of the standard library is loaded."""
    unset = {key: value for key, value in os.environ.items() if not key.endswith("MAX_CPU_ISA")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(PROGRAM)],
        env={**unset, "XDG_CACHE_HOME": str(tmp_path)}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []
    added, with_rooms = json.loads(done.stdout)
    assert {name.partition(".")[0] for name in added} - sys.stdlib_module_names <= {"mezzo", "torch"}
    heavy = ("torch._dynamo", "torch._inductor", "torch._export", "torch.export", "torch.onnx", "torch.distributed")
    unused = ("mezzo.numerics", "mezzo.overflow", "mezzo.trace", "mezzo.integrations")
    assert [name for name in added if name.startswith((*heavy, *unused))] == []
    # The executor's modules import Triton only for a kernel, and bridges a framework only by their own names.
    assert {"triton", "lightning", "accelerate", "transformers"} & {*with_rooms} == set()
