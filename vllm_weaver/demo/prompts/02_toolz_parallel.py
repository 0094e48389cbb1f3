# From toolz 1.1.0 (BSD-3-Clause): toolz/sandbox/parallel.py, from line 1
import functools
from toolz.itertoolz import partition_all
from toolz.utils import no_default


def _reduce(func, seq, initial=None):
    if initial is None:
        return functools.reduce(func, seq)
    else:
        return functools.reduce(func, seq, initial)


def fold(binop, seq, default=no_default, map=map, chunksize=128, combine=None):
    """
    Reduce without guarantee of ordered reduction.

    Parameters
    ----------
    binops
        Associative operator. The associative property allows us to