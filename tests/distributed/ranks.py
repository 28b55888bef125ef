"""Functions run as the ranks of a process group, each in a process of its own, over gloo."""

import contextlib
import faulthandler
import gc
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


def on_ranks(count, function, *args, timeout=600, backend="gloo", fresh=False):
    """Return what a function returns on each rank, in their order.

    Ranks stay for the next call: what torch makes once in a process, such as rules for each shape of a DTensor, takes
    longer than what most functions do.

    Args:
        count: How many ranks.
        function: One that is defined at the top of a test module; it and what it takes and returns can be pickled.
        *args: What it is given on each rank.
        timeout: Seconds after which all ranks are killed.
        backend: Of the process group; ``None`` leaves it to the function to make one.
        fresh: Whether to take ranks that have done nothing yet, and to end them afterwards; without a backend so it is.
    """
    fresh = fresh or backend is None
    ranks = None if fresh else _STAYING.pop(count, None)
    ranks = ranks or _Ranks(count, backend)
    answers = ranks.call(pickle.dumps((function.__module__, function.__qualname__, args)), time.monotonic() + timeout)
    texts = {rank: text for rank, (is_result, text) in answers.items() if not is_result}
    texts |= {rank: f"did not end in {timeout} s" for rank in range(count) if rank not in answers}
    if fresh or texts:
        ranks.end()
    else:
        _STAYING[count] = ranks
    if texts:
        raise RankError(texts)
    return [answers[rank][1] for rank in range(count)]


class _Ranks:
    """The processes of a group, which run one call after the other until the first that fails."""

    def __init__(self, count, backend):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.distributed.preloaded"])
        self.folder, self.there, self.processes = tempfile.TemporaryDirectory(), {}, []
        for rank in range(count):
            ours, theirs = context.Pipe()
            args = (theirs, rank, count, f"{self.folder.name}/store", backend)
            self.processes.append(context.Process(target=_rank, args=args, daemon=True))
            self.processes[-1].start()
            theirs.close()
            self.there[ours] = rank

    def call(self, call, end):
        """Return what came from each rank before a time: whether it is a result, and the result or the error's text."""
        answers, open_ = {}, dict(self.there)
        for connection in open_:
            with contextlib.suppress(OSError):  # of a rank that is gone, as will be told
                connection.send_bytes(call)
        while open_ and (left := end - time.monotonic()) > 0:
            for connection in wait(list(open_), left):
                rank = open_.pop(connection)
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    answers[rank] = (False, "was killed")
        return answers

    def end(self):
        for connection in self.there:
            connection.close()
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


#: By their number: ranks that wait for another call. They end with this process.
_STAYING = {}


def _rank(connection, rank, count, store, backend):
    """Be one rank: run calls, and send what each returns, or the traceback of the one that ends it."""
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
                timeout=timedelta(seconds=300),
            )
        with contextlib.suppress(EOFError, OSError):
            while True:
                module, name, args = pickle.loads(connection.recv_bytes())
                result = getattr(importlib.import_module(module), name)(*args)
                connection.send_bytes(pickle.dumps((True, result)))
                del result, args
                gc.collect()  # reducers in cycles
                sys.stdout.flush()
    except BaseException:
        connection.send_bytes(pickle.dumps((False, traceback.format_exc())))
    sys.stdout.flush()
    os._exit(0)  # without the goodbyes of a process group whose other ranks may be gone


def text_of(call):
    """Return the name and the text of what a call raises, or nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
