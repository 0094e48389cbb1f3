# From formulaic 1.2.2 (MIT): formulaic/utils/calculus.py, from line 1
from collections.abc import Iterable
from typing import cast

from formulaic.parser.types import Factor, Term
from formulaic.parser.types.ordered_set import OrderedSet


def differentiate_term(
    term: Term,
    wrt: Iterable[str],  # pylint: disable=redefined-builtin
    use_sympy: bool = False,
) -> Term:
    """
    Symbolically differentiate a `Term` instance with respect to one or more `wrt`.

    Args: