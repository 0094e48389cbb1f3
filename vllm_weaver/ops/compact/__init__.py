# SPDX-License-Identifier: Apache-2.0
"""KV compaction (spec section 6): the accepted path's cache rows move to the front of the tree's.

The module knows nothing of vLLM, of which layers exist or of how slots were assigned. `reference`
is the definition; `triton` moves the rows of all caches in one launch.
"""

from collections.abc import Sequence

from torch import Tensor

from vllm_weaver.ops.compact.reference import compact_kv_reference
from vllm_weaver.ops.compact.table import OP, CacheTable
from vllm_weaver.ops.dispatch import Backends, expect_indices, expect_shapes, refuse

__all__ = ["CacheTable", "compact_kv"]

_BACKENDS = Backends(OP, compact_kv_reference)
_BACKENDS.register(
    "triton", "vllm_weaver.ops.compact.triton:compact_kv_triton", default_on=("cuda",)
)


def compact_kv(
    caches: Sequence[Tensor] | CacheTable,
    slots: Tensor,
    path: Tensor,
    length: Tensor,
    *,
    backend: str | None = None,
) -> None:
    """Move the cache row of node path[i] to the slot of row i, for i < length, in every cache.

    ======  ==============================  =====  ======  ======================================
    name    shape                           dtype  in/out  meaning
    ======  ==============================  =====  ======  ======================================
    caches  list of                         any    in/out  keys and values are entries of their
            [blocks, block_size, HKV, D_h]                 own; any strides; one block size. A
                                                           `CacheTable` of them saves the checks
    slots   [R, T]                          int32  in      block * block_size + offset of each
                                                           row (int64 is fine); negative: none
    path    [R, D_max + 1]                  int32  in      accepted nodes from the root on,
                                                           ascending, so path[i] >= i; then -1
    length  [R]                             int32  in      nodes on the path, root included;
                                                           0 and 1 move nothing
    ======  ==============================  =====  ======  ======================================

    A row that is both moved away and overwritten is read first. Slots of different rows differ. A
    move whose source or destination slot is negative is left out. Bits are copied as they are.

    Backends: "reference" (any device, no host synchronisation) and "triton" (one launch for all
    caches of equal shape, strides and element size; a set of caches that was not seen before has
    its addresses copied to the device, so make a `CacheTable`, or one call, before a CUDA graph is
    captured). None takes "triton" on a GPU, else "reference".

    Raises:
        ValueError: unknown backend, or shapes, dtypes or devices that do not fit together.
    """
    run = _BACKENDS.pick(backend, slots.device)
    _check(slots, path, length)
    table = caches if isinstance(caches, CacheTable) else CacheTable(caches)
    if table.device not in (None, slots.device):
        refuse(OP, f"caches[0] is on {table.device}, expected {slots.device}: move it there")
    run(table, slots, path, length)


def _check(slots: Tensor, path: Tensor, length: Tensor) -> None:
    if slots.dim() != 2 or path.dim() != 2:
        refuse(OP, f"slots {list(slots.shape)} and path {list(path.shape)} need 2 dimensions")
    R = slots.shape[0]
    expect_shapes(
        OP,
        slots.device,
        {"path": (path, (R, path.shape[1])), "length": (length, (R,))},
    )
    expect_indices(OP, {"slots": slots, "path": path, "length": length})
