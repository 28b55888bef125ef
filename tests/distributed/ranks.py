"""Functions run as the ranks of a process group, each in a process of its own, over gloo."""

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:  # where a rank finds the function that it is to run
    sys.path.append(ROOT)


class RankError(AssertionError):
    """Some ranks raised, were killed, or did not end in time.

    Attributes:
        texts: By rank: the traceback, or what became of the process.
    """

    def __init__(self, texts):
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, text in sorted(texts.items())))
        self.texts = texts


def on_ranks(count, function, *args, timeout=600, group_timeout=60, backend="gloo"):
    """Return what a function returns on each rank, in their order.

    Args:
        count: How many ranks.
        function: One that is defined at the top of a test module; it and what it takes and returns can be pickled.
        *args: What it is given on each rank.
        timeout: Seconds after which all ranks are killed.
        group_timeout: Seconds that a collective waits for the other ranks.
        backend: Of the process group; ``None`` leaves it to the function to make one.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.preloaded"])
    with tempfile.TemporaryDirectory() as folder:
        call = pickle.dumps((function.__module__, function.__qualname__, args))
        there, processes = {}, []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank, args=(theirs, rank, count, f"{folder}/store", backend, group_timeout, call)
            )
            process.start()
            theirs.close()
            there[ours] = rank
            processes.append(process)
        try:
            found = _answers(there, time.monotonic() + timeout)
            for connection, rank in there.items():
                connection.close()
                if rank in found:
                    processes[rank].join(5)
        finally:
            for process in processes:
                process.kill()
                process.join()
    texts = {rank: text for rank, (is_result, text) in found.items() if not is_result}
    texts |= {rank: f"did not end in {timeout} s" for rank in range(count) if rank not in found}
    if texts:
        raise RankError(texts)
    return [found[rank][1] for rank in range(count)]


def _answers(there, end):
    """Return what came from each rank before a time: whether it is a result, and the result or the error's text."""
    found, open_ = {}, dict(there)
    while open_ and (left := end - time.monotonic()) > 0:
        for connection in wait(list(open_), left):
            rank = open_.pop(connection)
            try:
                found[rank] = pickle.loads(connection.recv_bytes())
            except EOFError:
                found[rank] = (False, "was killed")
    return found


def _rank(answer, rank, count, store, backend, group_timeout, call):
    """Be one rank: run a call, and send what it returns, or the traceback."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    faulthandler.enable()  # a rank that a signal kills leaves the stacks of all its threads on standard error
    try:
        importlib.import_module("tests.processor").tell()
        if backend is not None:
            dist.init_process_group(
                backend,
                init_method=f"file://{store}",
                rank=rank,
                world_size=count,
                timeout=timedelta(seconds=group_timeout),
            )
        module, name, args = pickle.loads(call)
        answer.send_bytes(pickle.dumps((True, getattr(importlib.import_module(module), name)(*args))))
        with contextlib.suppress(EOFError, OSError):
            answer.recv_bytes()  # until all have answered: another rank may still be shaking hands with this one
    except BaseException:
        answer.send_bytes(pickle.dumps((False, traceback.format_exc())))
    sys.stdout.flush()
    os._exit(0)  # without the goodbyes of a process group whose other ranks may be gone


def text_of(call):
    """Return the name and the text of what a call raises, or nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
