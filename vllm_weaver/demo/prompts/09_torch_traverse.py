# From torch 2.11.0 (BSD-3-Clause): torch/distributed/checkpoint/_traverse.py, from line 4
from collections.abc import Callable, Collection, Mapping, MutableMapping
from typing import cast, TypeVar, Union

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import STATE_DICT_TYPE
from torch.distributed.tensor import DTensor


PATH_ITEM = Union[str, int]
OBJ_PATH = tuple[PATH_ITEM, ...]
T = TypeVar("T")

STATE_DICT_ITEM = object