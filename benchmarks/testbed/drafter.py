# SPDX-License-Identifier: Apache-2.0
"""The DFlash drafter: trained by `speculators`' own model, masks and losses; read back here.

`train_drafter` only feeds `speculators.models.dflash.DFlashDraftModel` with packed rows of tokens
and the target's hidden states. `Drafter` is a separate forward pass over the exported tensors, for
the adapter's training and for evaluation; `agreement` compares the two. Knows nothing of trees.

Shapes: B rows, T positions, A anchors per row, D draft depth, d width.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from .config import MASK_ID, DrafterShape, Size, TargetShape
from .optim import Optimiser, train
from .states import Rows, TextStates
from .target import Target, linear, mlp, norm, piece, rope, rotate

# DFlash's decay of the loss over the block: exp(-(position - 1) / gamma).
_GAMMA = 7.0

# Set where flex attention does not compile: masks are then dense.
DENSE_ATTENTION = False

# vLLM 0.32 on a CPU gives the context keys of every drafter layer the first layer's gain of the
# key norm. Gains that stay 1 make that harmless; the queries' gains are trained and do their work.
_FIXED = "k_norm.weight"


def new_speculator(size: Size, target_directory: Path, device: str, dtype: torch.dtype) -> Any:
    """`speculators`' DFlash model with the target's embedding, head and final norm."""
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import Qwen3Config

    logging.getLogger("speculators").setLevel(logging.ERROR)
    target, drafter = size.target, size.drafter
    heads, kv_heads, head_dim = drafter.heads(target)
    layers = Qwen3Config(
        vocab_size=target.vocab,
        hidden_size=target.width,
        intermediate_size=drafter.mlp,
        num_hidden_layers=drafter.layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=target.max_positions,
        rms_norm_eps=target.eps,
        rope_parameters={"rope_type": "default", "rope_theta": target.rope_theta},
        pad_token_id=None,
    )
    flex = device == "cuda" and not DENSE_ATTENTION
    layers._attn_implementation = "simple_flex_attention" if flex else "eager"
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=target.vocab,
        block_size=drafter.block,
        # z-lab numbers the layers whose output is read, speculators the hidden states.
        aux_hidden_state_layer_ids=[i + 1 for i in drafter.target_layers],
        mask_token_id=MASK_ID,
        sliding_window_non_causal=True,
        speculators_config=SpeculatorsConfig(
            algorithm="dflash",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=drafter.depth)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(
                name_or_path=str(target_directory), architectures=["Qwen3_5ForCausalLM"]
            ),
        ),
    )
    model = DFlashDraftModel(config=config)
    model.load_verifier_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.dim() == 2:
                std = parameter.shape[-1] ** -0.5
                # Residual branches start at zero, as the target's do.
                std *= "o_proj" not in name and "down_proj" not in name
                parameter.copy_(torch.randn_like(parameter) * std)
            elif name.endswith(_FIXED):
                parameter.requires_grad_(False)
    # A cast of the whole module would round the rotary frequencies too, and with them positions.
    frequencies = model.rotary_emb.inv_freq.clone()
    model = model.to(device=device, dtype=dtype).train()
    model.rotary_emb.inv_freq = frequencies.to(device)
    return model


def own_weights(model: Any) -> dict[str, Tensor]:
    """A speculator's own tensors, without those of its target, under their z-lab names."""
    return {
        name: p.detach()
        for name, p in model.named_parameters()
        if p.requires_grad or name.endswith(_FIXED)
    }


def _loss(size: Size, model: Any, packed: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    from speculators.losses import resolve_loss_config

    _, loss, metrics = model(
        **packed,
        loss_config=resolve_loss_config("kl_div", "eager"),
        gamma=_GAMMA,
        max_anchors=size.train_drafter.rows,
        per_position_loss_weight="fixed-exp-decay",
    )
    return loss, metrics


def try_step(
    size: Size,
    target_directory: Path,
    packed: dict[str, Tensor],
    device: str,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Two forward and backward passes of a fresh speculator: compiles what training will run.
    Returns its own tensors."""
    model = new_speculator(size, target_directory, device, dtype)
    for _ in range(2):
        loss, _ = _loss(size, model, packed)
        loss.backward()
    float(loss.detach())
    return own_weights(model)


def train_drafter(
    size: Size,
    states: TextStates,
    target_directory: Path,
    device: str,
    dtype: torch.dtype,
    *,
    seconds: float | None,
    log: Callable[[str], None],
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    model = new_speculator(size, target_directory, device, dtype)
    stage, rows = size.train_drafter, [group.step_rows for group in size.groups]
    optimiser = Optimiser([(n, p) for n, p in model.named_parameters() if p.requires_grad], stage)

    def loss_of(progress: float) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = _loss(size, model, states.draw(rows))
        length = metrics["eal_sum"] / metrics["eal_total"].clamp(min=1)
        return loss, {"expected_accepted_length": length}

    record = train("drafter", stage, optimiser, loss_of, seconds=seconds, log=log)
    return own_weights(model), record


_LAYER = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.q_norm",
    "self_attn.k_proj",
    "self_attn.k_norm",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


@piece
def _layer(
    x: Tensor,
    context: Tensor,
    before: Tensor,
    turns: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]],
    weights: tuple[Tensor, ...],
    shape: tuple[int, int, int],
    block: int,
    eps: float,
) -> Tensor:
    """A layer of the exported drafter over blocks `x` [B, A * block, d], whose rows see the context
    [B, T, d] where `before` [B, A * block, T], and their own block. `turns` are the angles of the
    blocks and of the context, `weights` those of `_LAYER`."""
    gain, q_weight, q_gain, k_weight, k_gain, v_weight, o_weight, *mlp_weights = weights
    num_heads, kv_heads, head_dim = shape
    batch, length = context.shape[:2]
    count, group = x.shape[1] // block, num_heads // kv_heads

    def heads(
        y: Tensor, weight: Tensor, gain: Tensor | None, angles: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        y = linear(y, weight).unflatten(-1, (-1, head_dim))
        if gain is not None:
            y = norm(y, gain, eps)
        y = y.transpose(1, 2)
        return rotate(y, *angles) if angles is not None else y

    h = norm(x, gain, eps)
    q = heads(h, q_weight, q_gain, turns[0])
    keys, values = [], []
    for source, angles in ((context, turns[1]), (h, turns[0])):
        keys.append(heads(source, k_weight, k_gain, angles).repeat_interleave(group, 1))
        values.append(heads(source, v_weight, None, None).repeat_interleave(group, 1))
    scale = head_dim**-0.5
    far = (q @ keys[0].transpose(-1, -2)).float() * scale
    far = far.masked_fill(~before[:, None], float("-inf"))
    blocks = (batch, num_heads, count, block, head_dim)
    q, k, v = (t.reshape(blocks) for t in (q, keys[1], values[1]))
    near = ((q @ k.transpose(-1, -2)).float() * scale).flatten(2, 3)
    share = torch.cat([far, near], -1).softmax(-1).to(x.dtype)
    o = share[..., :length] @ values[0]
    own = share[..., length:].unflatten(2, (count, block)) @ v
    o = (o + own.flatten(2, 3)).transpose(1, 2).flatten(-2)
    return mlp(x + linear(o, o_weight), tuple(mlp_weights), eps)


class Drafter:
    """The exported drafter's forward pass: hidden states of the D masked positions."""

    def __init__(
        self,
        weights: dict[str, Tensor],
        shape: DrafterShape,
        target: TargetShape,
        device: str,
        dtype: torch.dtype,
    ) -> None:
        self.shape, self.target, self.dtype = shape, target, dtype
        self.weights = {name: w.to(device, torch.float32) for name, w in weights.items()}

    @classmethod
    def load(
        cls,
        directory: Path,
        shape: DrafterShape,
        target: TargetShape,
        device: str,
        dtype: torch.dtype,
    ) -> Drafter:
        return cls(load_file(directory / "model.safetensors"), shape, target, device, dtype)

    @torch.no_grad()
    def __call__(
        self, auxiliary: Tensor, ids: Tensor, anchors: Tensor, embedding: Tensor
    ) -> Tensor:
        """Hidden states after the final norm, [B, A, D, d].

        `auxiliary` [B, T, n * d] are the target's layer outputs, `anchors` [B, A] positions of the
        last known token, which is not yet in the context: the block at position a sees the
        auxiliary states of positions below a, the token at a, and its own D masks.
        """
        weights, target, block = self.weights, self.target, self.shape.block
        heads = self.shape.heads(target)
        place = torch.arange(ids.shape[1], device=ids.device)
        context = norm(linear(auxiliary.to(self.dtype), weights["fc.weight"]),
                       weights["hidden_norm.weight"], target.eps)  # fmt: skip
        tokens = F.pad(ids.gather(1, anchors)[..., None], (0, block - 1), value=MASK_ID)
        x = F.embedding(tokens, embedding).to(self.dtype).flatten(1, 2)
        positions = (anchors[..., None] + torch.arange(block, device=ids.device)).flatten(1)
        cos, sin = rope(positions, heads[2], target.rope_theta)
        turns = (cos[:, None], sin[:, None]), rope(place, heads[2], target.rope_theta)
        before = place < anchors.repeat_interleave(block, 1)[..., None]
        for i in range(self.shape.layers):
            layer = tuple(weights[f"layers.{i}.{name}.weight"] for name in _LAYER)
            x = _layer(x, context, before, turns, layer, heads, block, target.eps)
        x = norm(x, weights["norm.weight"], target.eps)
        # Whole rows: a product with the head would else be one small product for each block.
        return x.unflatten(1, (anchors.shape[1], block))[:, :, 1:].contiguous()


def agreement(
    size: Size, target: Target, target_directory: Path, drafter: Drafter, ids: Tensor
) -> float:
    """Largest difference between `speculators`' hidden states and `Drafter`'s, in float32.

    Run on a CPU. The speculator gets the exported tensors; both draft from the same anchors.
    """
    model = new_speculator(size, target_directory, "cpu", torch.float32).eval()
    model.load_state_dict(drafter.weights, strict=False)
    shape = size.drafter
    start = torch.full((ids.shape[0],), shape.block)
    states = TextStates(target, [Rows(ids, start)], shape.target_layers, shape.block, torch.float32)
    inputs = states.pack([torch.arange(len(ids))])
    chosen: dict[str, Tensor] = {}
    build_mask = model._build_attention_mask

    def remember(*arguments: Any) -> Any:
        result = build_mask(*arguments)
        chosen["anchors"] = result[2]
        return result

    model._build_attention_mask = remember
    length = ids.shape[1]
    count = ids.shape[0] * (length - 2 * shape.block)
    with torch.no_grad():
        hidden, *_ = model._backbone_forward(**inputs, max_anchors=count)
    hidden = hidden[0].view(count, shape.block, -1)[:, 1:]
    worst = 0.0
    for row in range(ids.shape[0]):
        mine = chosen["anchors"] // length == row
        anchors = chosen["anchors"][mine] - row * length
        if not len(anchors):
            continue
        row_ids, _, auxiliary, _ = states.rows(0, row, 1)
        ours = drafter(auxiliary, row_ids, anchors[None], target.embedding)
        worst = max(worst, float((ours[0] - hidden[mine]).abs().max()))
    return worst
