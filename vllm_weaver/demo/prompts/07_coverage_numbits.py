# From coverage 7.16.2 (Apache-2.0): coverage/numbits.py, from line 17
from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from itertools import zip_longest


def nums_to_numbits(nums: Iterable[int]) -> bytes:
    """Convert `nums` into a numbits.

    Arguments:
        nums: a reusable iterable of integers, the line numbers to store.

    Returns:
        A binary blob.
    """
    try:
        nbytes = max(nums) // 8 + 1
    except ValueError:
        # nums was empty.
        return b""