# SPDX-License-Identifier: Apache-2.0
"""Candidate pools (spec sections 1 and 2): the best tokens of each row of logits over a vocabulary.

The module knows nothing of drafters or trees. `reference` is the definition, `triton` the kernels.
"""

import torch
from torch import Tensor

from vllm_weaver.ops.dispatch import Backends, expect_shapes, refuse
from vllm_weaver.ops.pool.reference import top_pool_reference

__all__ = ["top_pool"]

OP = "top_pool"
MAX_TRITON_COUNT = 1024

_BACKENDS = Backends(OP, top_pool_reference)
_BACKENDS.register("triton", "vllm_weaver.ops.pool.triton:top_pool_triton", default_on=("cuda",))


def top_pool(
    logits_NV: Tensor,
    count: int,
    *,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` largest logits of each row, falling, and their log-probabilities over the row.

    ============  ==========  =======  ======  =====================================================
    name          shape       dtype    in/out  meaning
    ============  ==========  =======  ======  =====================================================
    logits_NV     [N, V]      float    in      rows may be strided, entries of a row may not
    count         scalar      int      in      P, 1 to V
    ids_NP        [N, P]      int64    out     columns, by falling logit; of equal logits (both
                                               zeros are equal) the lower column comes first
    logits_NP     [N, P]      float32  out     the logits themselves
    log_probs_NP  [N, P]      float32  out     less the logarithm of the row's sum of exponentials
    ============  ==========  =======  ======  =====================================================

    `out` takes contiguous tensors for the three results, which are then returned; None makes new
    ones.

    The order is a function of the values alone, so that all ranks of a model agree. NaN counts as
    -inf, in the sum as well. Where fewer than P entries are above -inf, the rest are the first
    columns of -inf, with log-probability -inf; a row of -inf alone gives columns 0 to P - 1.

    Backends: "reference" (any device) and "triton" (P to 1024; float16, bfloat16, float32; two
    launches, no host synchronisation). None takes "triton" on a GPU where P allows it, else
    "reference".

    Raises:
        ValueError: unknown backend, shapes or dtypes that do not fit, or inputs that the chosen
            backend does not take.
    """
    if logits_NV.dim() != 2:
        refuse(OP, f"logits have shape {list(logits_NV.shape)}, expected [N, V]")
    if logits_NV.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        refuse(OP, f"logits are {logits_NV.dtype}, expected float16, bfloat16 or float32")
    if not 1 <= count <= logits_NV.shape[1]:
        refuse(OP, f"count is {count}, expected 1 to the {logits_NV.shape[1]} columns")
    if backend is None and count > MAX_TRITON_COUNT:
        backend = "reference"
    if out is not None:
        names = ("ids_NP", "logits_NP", "log_probs_NP")
        shape = (logits_NV.shape[0], count)
        expect_shapes(
            OP, logits_NV.device, {n: (x, shape) for n, x in zip(names, out, strict=True)}
        )
        dtypes = [torch.int64, torch.float32, torch.float32]
        if [x.dtype for x in out] != dtypes or not all(x.is_contiguous() for x in out):
            refuse(OP, "out is not contiguous, or not int64, float32 and float32")
    return _BACKENDS.pick(backend, logits_NV.device)(logits_NV, count, out)
