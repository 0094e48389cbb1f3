# SPDX-License-Identifier: Apache-2.0
"""Small random adapters and decode steps, and the definition once more, row by row in float64.

The oracle is written from the tensor table of spec section 2 and shares no code with the package.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from vllm_weaver.adapter import WeaverAdapter, WeaverConfig


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are slower with every further thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Case:
    """An adapter, its target's two matrices, and the inputs of one decode step."""

    adapter: WeaverAdapter
    embed: Tensor
    lm_head: Tensor
    h_ver: Tensor
    h_draft: Tensor
    ids: Tensor
    logits: Tensor

    @property
    def step(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.h_ver, self.h_draft, self.ids, self.logits


def _make_case(
    variant: str = "v1",
    num_layers: int = 1,
    *,
    requests: int = 3,
    depth: int = 4,
    pool: int = 6,
    vocab: int = 40,
    seed: int = 0,
    activation: str | None = None,
) -> Case:
    torch.manual_seed(seed)
    config = WeaverConfig(
        d_model=12,
        d_embed=10,
        d_rank=16,
        num_layers=num_layers,
        num_heads=2,
        mlp_dim=20,
        depth=depth,
        candidate_pool_size=pool,
        variant=variant,
        activation=activation,
    )
    adapter = WeaverAdapter(config)
    with torch.no_grad():
        for name, parameter in adapter.named_parameters():
            # Large enough that norms, biases, positions and attention all matter to the result.
            scale = 0.5 if parameter.dim() == 1 or name == "pos_emb" else 0.25
            parameter.normal_(std=scale)
            if name.endswith("norm.weight") or (".norm_" in name and name.endswith("weight")):
                parameter.add_(1.0)
    ids = torch.stack([torch.randperm(vocab)[:pool] for _ in range(requests * depth)]).view(
        requests, depth, pool
    )
    return Case(
        adapter,
        torch.randn(vocab, 10),
        torch.randn(vocab, 12),
        torch.randn(requests, 12) * 3,
        torch.randn(requests, depth, 12) * 3,
        ids.int(),
        torch.randn(requests, depth, pool) * 2,
    )


@pytest.fixture
def make_case() -> Callable[..., Case]:
    return _make_case


def _norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x / math.sqrt(float((x * x).mean()) + 1e-6) * weight + bias


def _rotate(head: Tensor, position: int, base: float) -> Tensor:
    half = len(head) // 2
    out = head.clone()
    for i in range(half):
        angle = position * base ** (-i / half)
        out[i] = head[i] * math.cos(angle) - head[half + i] * math.sin(angle)
        out[half + i] = head[half + i] * math.cos(angle) + head[i] * math.sin(angle)
    return out


def _activate(p: dict[str, Tensor], block: str, y: Tensor, activation: str) -> Tensor:
    if activation == "swiglu":
        both = p[block + "gate_up_proj.weight"] @ y + p[block + "gate_up_proj.bias"]
        half = len(both) // 2
        gate, up = both[:half], both[half:]
        inner = gate / (1 + torch.exp(-gate)) * up
        return p[block + "down_proj.weight"] @ inner + p[block + "down_proj.bias"]
    z = p[block + "fc1.weight"] @ y + p[block + "fc1.bias"]
    if activation == "gelu":
        inner = z * 0.5 * (1 + torch.erf(z / math.sqrt(2)))
    else:
        inner = 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    return p[block + "fc2.weight"] @ inner + p[block + "fc2.bias"]


def _oracle(case: Case, request: int, path: list[int]) -> Tensor:
    """Log-probabilities over the pool of depth len(path), one row at a time."""
    config = case.adapter.config
    p = {name: value.double() for name, value in case.adapter.state_dict().items()}
    r, heads = config.d_rank, config.num_heads
    h = r // heads
    rows: list[Tensor] = []
    positions: list[int] = []
    states = [case.h_ver[request], *case.h_draft[request]]
    for t, state in enumerate(states):
        normed = _norm(state.double(), p["output_norm.weight"], p["output_norm.bias"])
        x = p["proposal_in.weight"] @ normed + p["proposal_in.bias"]
        if config.variant == "v1" and t > 0:
            x = x + p["pos_emb"][t - 1]
        rows.append(x)
        positions.append(t)
    for k, token in enumerate(path):
        row = case.embed[token].double()
        normed = _norm(row, p["embed_norm.weight"], p["embed_norm.bias"])
        x = p["token_in.weight"] @ normed + p["token_in.bias"]
        if config.variant == "v1":
            x = x + p["pos_emb"][min(k, config.depth - 1)]
        rows.append(x)
        positions.append(k + 1)

    for layer in range(config.num_layers):
        b = f"blocks.{layer}."
        qs, ks, vs = [], [], []
        for x, position in zip(rows, positions, strict=True):
            normed = _norm(x, p[b + "norm_attn.weight"], p[b + "norm_attn.bias"])
            qkv = p[b + "qkv_proj.weight"] @ normed
            q = [qkv[i * h : (i + 1) * h] for i in range(heads)]
            k = [qkv[r + i * h : r + (i + 1) * h] for i in range(heads)]
            v = [qkv[2 * r + i * h : 2 * r + (i + 1) * h] for i in range(heads)]
            if config.variant == "v2":
                q = [_rotate(head, position, config.rope_base) for head in q]
                k = [_rotate(head, position, config.rope_base) for head in k]
            qs.append(q)
            ks.append(k)
            vs.append(v)
        out = []
        for i, x in enumerate(rows):
            merged = []
            for n in range(heads):
                scores = torch.stack([qs[i][n] @ ks[j][n] for j in range(i + 1)]) / math.sqrt(h)
                weights = torch.exp(scores - scores.max())
                weights = weights / weights.sum()
                merged.append(sum(weights[j] * vs[j][n] for j in range(i + 1)))
            x = x + p[b + "o_proj.weight"] @ torch.cat(merged)
            y = _norm(x, p[b + "norm_mlp.weight"], p[b + "norm_mlp.bias"])
            out.append(x + _activate(p, b, y, config.activation))
        rows = out

    normed = _norm(rows[-1], p["out_norm.weight"], p["out_norm.bias"])
    query = p["lm_head_query_in.weight"] @ normed
    depth = len(path) - 1
    logits = []
    for candidate, raw in zip(
        case.ids[request, depth].tolist(), case.logits[request, depth].tolist(), strict=True
    ):
        if candidate < 0:
            logits.append(-math.inf)
        else:
            logits.append(raw + float(case.lm_head[candidate].double() @ query))
    total = math.log(sum(math.exp(x) for x in logits)) if max(logits) > -math.inf else 0.0
    return torch.tensor([x - total for x in logits], dtype=torch.float64)


@pytest.fixture
def oracle() -> Callable[[Case, int, list[int]], Tensor]:
    return _oracle


@dataclass
class Tree:
    """What an expander reads of a tree, and the tokens and depths a builder would hand it."""

    parents: Tensor
    tokens: Tensor
    depths: Tensor

    def path(self, request: int, node: int) -> list[int]:
        tokens: list[int] = []
        while node >= 0:
            tokens.insert(0, int(self.tokens[request, node]))
            node = int(self.parents[request, node])
        return tokens


def _random_tree(requests: int, rows: int, max_depth: int, vocab: int, seed: int = 0) -> Tree:
    generator = torch.Generator().manual_seed(seed)
    parents = torch.full((requests, rows), -1, dtype=torch.int32)
    depths = torch.zeros(requests, rows, dtype=torch.int32)
    for request in range(requests):
        for node in range(1, rows):
            open_nodes = [i for i in range(node) if depths[request, i] < max_depth]
            pick = int(torch.randint(len(open_nodes), (), generator=generator))
            parents[request, node] = open_nodes[pick]
            depths[request, node] = depths[request, open_nodes[pick]] + 1
    tokens = torch.randint(vocab, (requests, rows), generator=generator, dtype=torch.int32)
    return Tree(parents, tokens, depths)


@pytest.fixture
def random_tree() -> Callable[..., Tree]:
    return _random_tree
