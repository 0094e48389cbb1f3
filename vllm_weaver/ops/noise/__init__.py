# SPDX-License-Identifier: Apache-2.0
"""Keyed Gumbel noise: the very draws that a sampler will use, for a few tokens of the vocabulary.

The module knows nothing of vLLM or of trees. `reference` is the definition; `triton` makes the
noise of all pools of a step in one launch.
"""

from torch import Tensor

from vllm_weaver.ops.dispatch import Backends, expect_indices, expect_shapes, refuse
from vllm_weaver.ops.noise.reference import keyed_gumbel_reference

__all__ = ["keyed_gumbel"]

OP = "keyed_gumbel"

_BACKENDS = Backends(OP, keyed_gumbel_reference)
_BACKENDS.register(
    "triton", "vllm_weaver.ops.noise.triton:keyed_gumbel_triton", default_on=("cuda",)
)


def keyed_gumbel(
    seeds: Tensor,
    positions: Tensor,
    ids: Tensor,
    *,
    use_fp64: bool = False,
    shift: int = 0,
    backend: str | None = None,
) -> Tensor:
    """Gumbel noise of candidate tokens, as vLLM 0.32 adds it to their log-probabilities.

    =========  =========  =======  ======  ====================================================
    name       shape      dtype    in/out  meaning
    =========  =========  =======  ======  ====================================================
    seeds      [R]        int64    in      seed of each request
    positions  [R, D]     int64    in      position of the row that samples: that of the last
                                           token before the candidates
    ids        [R, D, P]  int64    in      candidates (int32 is fine); any value at padding
    use_fp64              bool     in      vLLM's `use_fp64_gumbel`: other bits, other noise
    shift                 int      in      added to the positions
    returns    [R, D, P]  float32  out     noise, finite
    =========  =========  =======  ======  ====================================================

    Backends: "reference" (any device) and "triton" (one launch). None takes "triton" on a GPU,
    else "reference". Neither waits for the device. They use the same bits; the noise differs by
    rounding in the logarithms.

    Raises:
        ValueError: unknown backend, or shapes, dtypes or devices that do not fit together.
    """
    if ids.dim() != 3:
        refuse(OP, f"ids {list(ids.shape)} needs 3 dimensions")
    R, D, _ = ids.shape
    expect_shapes(OP, ids.device, {"seeds": (seeds, (R,)), "positions": (positions, (R, D))})
    expect_indices(OP, {"seeds": seeds, "positions": positions, "ids": ids})
    return _BACKENDS.pick(backend, ids.device)(
        seeds, positions, ids, use_fp64=use_fp64, shift=shift
    )
