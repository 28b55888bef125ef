"""Graphs from the test suites of TensorFlow and Paddle, as data, with what their tests say becomes half precision.

Each line is an op, its list, and the ops whose floating tensors it reads. A dash is no list: a source, or an op that
must be preserved. What their tests do not say is not said here.
"""

from dataclasses import dataclass

from mezzo.plan.heuristics import Listed


@dataclass(frozen=True)
class Worked:
    """A worked graph: ``low`` and ``high`` are the ops that their test names, ``casts`` is the number it expects."""

    name: str
    graph: Listed
    ops: tuple[str, ...]
    low: tuple[str, ...]
    high: tuple[str, ...]
    casts: int | None


def worked(name, text, *, low, high, casts):
    lines = [line.split() for line in text.strip().splitlines()]
    ops = tuple(line[0] for line in lines)
    lists = tuple(None if line[1] == "-" else line[1] for line in lines)
    inputs = tuple(tuple(ops.index(name) for name in line[2:]) for line in lines)
    return Worked(name, Listed(lists, inputs), ops, tuple(low.split()), tuple(high.split()), casts)


# tensorflow/tensorflow tensorflow/core/grappler/optimizers/auto_mixed_precision_test.cc at 0059df7512d0; NoInferOp is
# of a later version, in mhyttsten/tf_xla at 77e11ddb3133. casts are the nodes by which the graph grows; what is fetched
# is preserved. Left out: TensorLists, which are painted by groups; AlreadyFp16, AlreadyBf16 and ExistingCast, with
# casts in the graph; RecurrentEdgeColorMismatch, with a loop.
TENSORFLOW = (
    worked(
        "NoOp",
        """
        input  -
        deny1  deny   input
        clr1   clear  deny1
        infer1 infer  clr1
        clr2   clear  infer1
        fetch  -      clr2
        """,
        low="",
        high="input deny1 clr1 infer1 clr2",
        casts=0,
    ),
    worked(
        "Simple",
        """
        input  -
        deny1  deny   input
        clr1   clear  deny1
        infer1 infer  clr1
        clr2   clear  infer1
        allow1 allow  clr2 clr2
        clr3   clear  allow1
        infer2 infer  clr3
        clr4   clear  infer2
        deny2  deny   clr4 clr4
        clr5   clear  deny2
        fetch  -      clr5
        """,
        low="clr2 allow1 clr3",
        high="input deny1 clr1 infer1 infer2 clr4 deny2 clr5",
        casts=2,
    ),
    worked(
        "Simple of the lists for BF16 on CPUs, where a logarithm is denied",
        """
        input  -
        deny1  deny   input
        clr1   clear  deny1
        infer1 infer  clr1
        clr2   clear  infer1
        allow1 allow  clr2 clr2
        clr3   clear  allow1
        deny2  deny   clr3
        clr4   clear  deny2
        deny3  deny   clr4 clr4
        clr5   clear  deny3
        fetch  -      clr5
        """,
        low="clr2 allow1 clr3",
        high="input deny1 clr1 infer1 deny2 clr4 deny3 clr5",
        casts=2,
    ),
    worked(
        "NoInferOp, where inferred ops are denied",
        """
        input  -
        deny1  deny   input
        clr1   clear  deny1
        infer1 deny   clr1
        clr2   clear  infer1
        allow1 allow  clr2 clr2
        clr3   clear  allow1
        infer2 deny   clr3
        clr4   clear  infer2
        allow2 allow  clr4 clr4
        infer3 deny   allow2
        fetch  -      infer3
        """,
        low="clr2 allow1 clr3 clr4 allow2",
        high="input deny1 clr1 infer1 infer2 infer3",
        casts=4,
    ),
    worked(
        "BidirectionalClearChain",
        """
        input  -
        clr1   clear  input
        clr2   clear  input
        allow1 allow  clr1 clr1
        clr3   clear  clr1 clr2
        clr4   clear  clr2
        fetch1 -      allow1
        fetch2 -      clr4
        """,
        low="clr1 clr2 allow1 clr3 clr4",
        high="input",
        casts=3,
    ),
    worked(
        "PreserveFetches, of allow1, clr2 and clr3",
        """
        input  -
        allow1 -      input input
        clr1   clear  allow1
        infer1 infer  clr1
        deny1  deny   infer1
        clr2   -      deny1
        allow2 allow  clr2 clr2
        clr3   -      allow2
        deny2  deny   clr3
        clr4   clear  deny2
        """,
        low="allow2",
        high="input allow1 clr1 infer1 deny1 clr2 clr3 deny2 clr4",
        casts=2,
    ),
    worked(
        "PreserveCPUNodes, of allow2",
        """
        input  -
        clr1   clear  input
        allow1 allow  clr1 clr1
        infer1 infer  allow1
        allow2 -      infer1 infer1
        clr2   clear  allow2
        fetch  -      clr2
        """,
        low="clr1 allow1",
        high="input infer1 allow2 clr2",
        casts=2,
    ),
    worked(
        "PreserveIdentityAfterVariable, of clr1",
        """
        input  -
        var1   -
        clr1   -      var1
        allow1 allow  input clr1
        input2 -
        clr2   clear  input2
        allow2 allow  input clr2
        fetch1 -      allow1
        fetch2 -      allow2
        """,
        low="allow1 clr2 allow2",
        high="input var1 clr1 input2",
        casts=5,
    ),
    worked(
        "FusedBatchNorm, whose statistics have a type of their own, FP32",
        """
        input  -
        weight -
        allow1 allow  input weight
        fbn1   infer  allow1
        bng1   infer  fbn1 allow1
        infer1 infer  fbn1 bng1
        allow2 allow  infer1 weight
        fetch  -      allow2
        """,
        low="allow1 fbn1 bng1 infer1 allow2",
        high="",
        casts=3,
    ),
    worked(
        "RepeatedAndListTypeAttrs",
        """
        input  -
        allow1 allow  input input
        clr1   clear  allow1 allow1 allow1
        infer1 infer  clr1 clr1 clr1
        allow2 allow  infer1 infer1
        fetch  -      allow2
        """,
        low="allow1 clr1 infer1 allow2",
        high="input",
        casts=2,
    ),
    worked(
        "BatchMatMul",
        """
        input  -
        allow1 allow  input input
        fetch1 -      allow1
        """,
        low="allow1",
        high="input",
        casts=2,
    ),
    worked(
        "TanhOp, and twelve more of that graph",
        """
        eye    -
        input  -
        allow1 allow  input eye
        infer1 infer  allow1
        allow2 allow  infer1 eye
        fetch1 -      allow2
        """,
        low="allow1 infer1 allow2",
        high="input",
        casts=None,
    ),
)

# PaddlePaddle/Paddle, of which each test names how many calls of an op are low. Others of test/amp/ are of level O2,
# where weights are low, or compare losses; those of
# fp16_utils and of image classification say nothing of marks.
PADDLE_GRAY = (
    worked(
        "test/amp/test_model_cast_to_bf16.py, and test_amp_master_grad_static.py, at 12ab19aa14e6, test_amp_bf16_o1",
        """
        table           -
        lookup_table_v2 deny  table
        cast            infer
        elementwise_mul allow lookup_table_v2 cast
        weight          -
        matmul_v2       allow elementwise_mul weight
        bias            -
        elementwise_add infer matmul_v2 bias
        dropout         infer elementwise_add
        reduce_mean     deny  dropout
        """,
        low="matmul_v2 elementwise_add dropout",
        high="lookup_table_v2",
        casts=None,
    ),
    worked(
        "test/amp/test_amp_api.py at 046f126e1953, test_static_amp_OD: all is black but what is white",
        """
        input             -
        weight            -
        conv2d            allow input weight
        other             -
        elementwise_add   deny  conv2d other
        weight2           -
        matmul_v2         allow elementwise_add weight2
        bias              -
        elementwise_add.2 deny  matmul_v2 bias
        reduce_mean       deny  elementwise_add.2
        """,
        low="conv2d matmul_v2",
        high="elementwise_add elementwise_add.2 reduce_mean",
        casts=None,
    ),
)
PADDLE_PROMOTED = (
    worked(
        "test/amp/test_amp_promote.py at 09d06946d919, test_static_amp_o1",
        """
        input             -
        weight            -
        conv2d            allow input weight
        bias              -
        elementwise_add   infer conv2d bias
        cast              infer elementwise_add
        relu              infer cast
        flatten           clear relu
        weight2           -
        matmul_v2         allow flatten weight2
        bias2             -
        elementwise_add.2 infer matmul_v2 bias2
        softmax           deny  elementwise_add.2
        reduce_mean       deny  softmax
        """,
        low="conv2d matmul_v2",
        high="elementwise_add relu elementwise_add.2 softmax reduce_mean",
        casts=None,
    ),
    worked(
        "test/amp/test_pir_amp.py at 00816fcb21ad, test_linear_amp_o1",
        """
        x      -
        weight -
        matmul allow x weight
        bias   -
        add    infer matmul bias
        mean   deny  add
        """,
        low="",
        high="add mean",
        casts=3,
    ),
)
