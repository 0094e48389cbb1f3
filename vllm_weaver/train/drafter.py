# SPDX-License-Identifier: Apache-2.0
"""A frozen DFlash drafter in z-lab's or speculators' format, run by speculators' own layers.

Knows the two formats and the drafter's hidden states; not the adapter. Layer ids are speculators'
everywhere: id i is the output of decoder layer i - 1 (0 is the embedding), z-lab's id plus 1.

Shapes: L tokens of a document, A anchors (blocks), D draft depth, d width.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_weaver.train.errors import TrainError, first_line, require
from vllm_weaver.train.target import FrozenTarget, read_config, read_tensor, weight_files

# Tensors that a speculators checkpoint may repeat from its target.
_TARGETS_OWN = ("embed_tokens.", "lm_head.", "verifier_", "t2d", "d2t")
# Keys of a z-lab config.json that say nothing of the drafter's layers.
_NOT_LAYERS = ("architectures", "auto_map", "block_size", "dflash_config", "num_target_layers")


@dataclass(frozen=True)
class DrafterFacts:
    """What a drafter's config.json says.

    Attributes:
        name: as given.
        block: anchor and masks, D + 1.
        layer_ids: hidden states of the target that it reads.
        mask_id: token of the masked positions.
        width, vocab: hidden size and vocabulary.
        window_non_causal: whether layers with a sliding window see their whole block.
        layers: config of the drafter's own transformer layers.
    """

    name: str
    block: int
    layer_ids: tuple[int, ...]
    mask_id: int
    width: int
    vocab: int
    window_non_causal: bool
    layers: dict[str, Any]

    @property
    def depth(self) -> int:
        """D: drafts of one block."""
        return self.block - 1

    @classmethod
    def read(cls, model: str) -> DrafterFacts:
        """Read either format.

        Raises:
            TrainError: not a DFlash drafter, or of a kind whose drafts an adapter cannot refine.
        """
        config = read_config(model)
        where = f"{model}/config.json"
        kind = config.get("speculators_model_type")
        if kind is not None:
            if kind != "dflash":
                raise TrainError(
                    f"{where}: speculators_model_type is {kind!r}: use a DFlash drafter ('dflash')"
                )
            layers = dict(config.get("transformer_layer_config") or {})
            block, mask = config.get("block_size"), config.get("mask_token_id")
            ids = config.get("aux_hidden_state_layer_ids")
            causal = not config.get("sliding_window_non_causal", False)
            if config.get("sample_from_anchor"):
                raise TrainError(
                    f"{where}: sample_from_anchor is on: adapters refine drafts of the masked "
                    "positions alone; use a drafter without it"
                )
            reduced = config.get("draft_vocab_size")
            if reduced is not None and reduced != layers.get("vocab_size"):
                raise TrainError(
                    f"{where}: draft_vocab_size is {reduced}, the target's vocabulary "
                    f"{layers.get('vocab_size')}: use a drafter of the whole vocabulary"
                )
        else:
            dflash = config.get("dflash_config")
            if not isinstance(dflash, dict):
                raise TrainError(
                    f"{where}: has neither speculators_model_type nor dflash_config: "
                    "use a DFlash drafter"
                )
            layers = {k: v for k, v in config.items() if k not in _NOT_LAYERS}
            block = config.get("block_size") or dflash.get("block_size")
            mask, ids = dflash.get("mask_token_id"), dflash.get("target_layer_ids")
            ids = None if ids is None else [i + 1 for i in ids]
            causal = bool(dflash.get("causal", False))
        facts = {
            "block_size": block,
            "mask_token_id": mask,
            "hidden_size": layers.get("hidden_size"),
            "vocab_size": layers.get("vocab_size"),
        }
        for key, value in facts.items():
            if not isinstance(value, int):
                raise TrainError(f"{where}: {key} is {value!r}: use a complete DFlash drafter")
        if not isinstance(ids, list) or not ids:
            raise TrainError(f"{where}: names no auxiliary layers: use a complete DFlash drafter")
        assert isinstance(block, int) and isinstance(mask, int)
        if block < 2:
            raise TrainError(f"{where}: block_size is {block}: it must be 2 or more")
        return cls(
            name=model,
            block=block,
            layer_ids=tuple(ids),
            mask_id=mask,
            width=layers["hidden_size"],
            vocab=layers["vocab_size"],
            window_non_causal=not causal,
            layers=layers,
        )

    def speculators_config(
        self, target: str, architectures: list[str], budget: int | None = None
    ) -> dict[str, Any]:
        """The same drafter's config.json in speculators' format.

        With a `budget`, vLLM drafts so many tokens (tree nodes) where it is not told a number.
        """
        layers = {k: v for k, v in self.layers.items() if k not in ("dtype", "torch_dtype")}
        return {
            "architectures": ["DFlashDraftModel"],
            "speculators_model_type": "dflash",
            "block_size": self.block,
            "aux_hidden_state_layer_ids": list(self.layer_ids),
            "mask_token_id": self.mask_id,
            "sliding_window_non_causal": self.window_non_causal,
            "sample_from_anchor": False,
            "draft_vocab_size": self.vocab,
            "tie_word_embeddings": False,
            # vLLM hands these alone to its drafter, so its block and budget have to stand here.
            "transformer_layer_config": {
                **layers,
                "model_type": layers.get("model_type", "qwen3"),
                "block_size": self.block,
                **({} if budget is None else {"n_predict": budget}),
            },
            "speculators_config": {
                "algorithm": "dflash",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": self.depth}],
                "verifier": {"name_or_path": target, "architectures": architectures},
            },
        }


def drafter_tensors(
    model: str, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """The drafter's own tensors: layers, `fc`, `hidden_norm`, `norm`.

    Raises:
        TrainError: missing or damaged.
    """
    files = weight_files(model)
    own = [name for name in files if not name.startswith(_TARGETS_OWN)]
    return {name: read_tensor(files[name], name, device, dtype) for name in own}


class FrozenDrafter:
    """Computes hidden states of the masked positions, teacher-forced at given anchors."""

    def __init__(self, facts: DrafterFacts, model: Any, masks: tuple[Any, Any]) -> None:
        self.facts = facts
        self._model = model
        self._mask_mod, self._mask = masks

    @classmethod
    def load(
        cls, model: str, target: FrozenTarget, device: torch.device | str, dtype: torch.dtype
    ) -> FrozenDrafter:
        """Load a drafter for a target.

        Raises:
            TrainError: it is made for another target, incomplete, or speculators is missing.
        """
        facts = DrafterFacts.read(model)
        for key, theirs, ours in (
            ("hidden_size", facts.width, target.width),
            ("vocab_size", facts.vocab, target.vocab),
        ):
            if theirs != ours:
                raise TrainError(
                    f"{model}: {key} is {theirs} but that of {target.name} is {ours}: use the "
                    "drafter that was trained for this target"
                )
        if max(facts.layer_ids) > target.layers:
            raise TrainError(
                f"{model}: reads layer {max(facts.layer_ids)} but {target.name} has "
                f"{target.layers}: use the drafter that was trained for this target"
            )
        with _quiet():
            dflash = require("speculators.models.dflash", "running a DFlash drafter")
            attention = require("speculators.models.attention", "running a DFlash drafter")
            anchored = require("speculators.models.dflash.attention", "running a DFlash drafter")
            plain = facts.speculators_config(target.name, [])
            # The verifier's name would make the model read the whole target again.
            plain.pop("speculators_config")
            try:
                config = dflash.DFlashSpeculatorConfig(**plain)
                config.transformer_layer_config._attn_implementation = "sdpa"
                with torch.device("meta"):
                    built = dflash.DFlashDraftModel(config=config)
            except Exception as error:
                raise TrainError(
                    f"{model}: speculators cannot build it ({first_line(error)}): use a drafter "
                    "in z-lab's or speculators' DFlash format"
                ) from error
        for name in ("embed_tokens", "lm_head", "verifier_lm_head", "verifier_norm"):
            delattr(built, name)
        tensors = drafter_tensors(model, device, dtype)
        wanted = dict(built.named_parameters())
        for name, parameter in wanted.items():
            if name not in tensors:
                raise TrainError(f"{model}: tensor {name} is missing: fetch the drafter again")
            if tensors[name].shape != parameter.shape:
                raise TrainError(
                    f"{model}: {name} is {tuple(tensors[name].shape)} but its config makes it "
                    f"{tuple(parameter.shape)}: fetch both again"
                )
        foreign = [name for name in tensors if name not in wanted]
        if foreign:
            raise TrainError(
                f"{model}: tensor {foreign[0]} is not part of a DFlash drafter: "
                "use z-lab's or speculators' DFlash format"
            )
        built.load_state_dict(tensors, strict=False, assign=True)
        # Frequencies are no parameters: made anew where the model runs, and in float32.
        with torch.device(device):
            built.rotary_emb = type(built.rotary_emb)(built.rotary_emb.config)
        built.requires_grad_(False)
        return cls(
            facts,
            built.eval(),
            (anchored.create_anchor_block_mask_mod, attention.create_float_mask),
        )

    @torch.no_grad()
    def states(
        self, auxiliary_Lx: Tensor, tokens_L: Tensor, anchors_A: Tensor, embedding_Vd: Tensor
    ) -> Tensor:
        """Hidden states after the drafter's final norm, [A, D, d].

        | name | shape, dtype | meaning |
        |---|---|---|
        | `auxiliary_Lx` | [L, layers * d] float | the target's auxiliary states, side by side |
        | `tokens_L` | [L] int64 | the document |
        | `anchors_A` | [A] int64 | positions of the last known token of each block |
        | `embedding_Vd` | [V, d] float | the target's |

        The block at position a sees the auxiliary states of positions below a, the token at a, and
        its own D masks: what the drafter sees in an engine when token a has just been sampled.
        """
        model, block = self._model, self.facts.block
        length, device = tokens_L.shape[0], tokens_L.device
        dtype = model.fc.weight.dtype
        filled_AB = F.pad(tokens_L[anchors_A][:, None], (0, block - 1), value=self.facts.mask_id)
        x = F.embedding(filled_AB.flatten()[None], embedding_Vd).to(dtype)
        context = model.hidden_norm(model.fc(auxiliary_Lx[None].to(dtype)))
        offsets = torch.arange(block, device=device)
        positions = torch.cat(
            [torch.arange(length, device=device), (anchors_A[:, None] + offsets).flatten()]
        )[None]
        turn = model.rotary_emb(x, positions)
        windowed = set(model.sliding_window_indices)
        masks = {
            w: self._attention_mask(length, anchors_A, w, dtype)
            for w in {i in windowed for i in range(len(model.layers))}
        }
        for index, layer in enumerate(model.layers):
            x = layer(
                hidden_states=x,
                target_hidden=context,
                attention_mask=masks[index in windowed],
                position_ids=positions,
                position_embeddings=turn,
            )
        states: Tensor = model.norm(x)[0].unflatten(0, (-1, block))[:, 1:]
        return states

    def _attention_mask(
        self, length: int, anchors_A: Tensor, windowed: bool, dtype: torch.dtype
    ) -> Tensor:
        mask_mod, queries, keys = self._mask_mod(
            document_ids=torch.zeros(length, dtype=torch.long, device=anchors_A.device),
            total_seq_len=length,
            anchor_positions=anchors_A,
            block_size=self.facts.block,
            sliding_window=self._model.sliding_window if windowed else None,
            sliding_window_non_causal=self.facts.window_non_causal,
        )
        mask: Tensor = self._mask(
            mask_mod, Q_LEN=queries, KV_LEN=keys, device=anchors_A.device, dtype=dtype
        )
        return mask

    def bytes(self) -> int:
        """Memory of the tensors."""
        return sum(p.numel() * p.element_size() for p in self._model.parameters())


def architectures_of(model: str) -> list[str]:
    """A target's architectures, as its config.json names them."""
    names = read_config(model).get("architectures")
    return list(names) if isinstance(names, list) else []


def is_drafter(path: str | Path) -> bool:
    """Whether a directory's config.json is that of a DFlash drafter."""
    if not Path(path).is_dir():
        return False
    try:
        config = read_config(str(path))
    except TrainError:
        return False
    return config.get("speculators_model_type") == "dflash" or "dflash_config" in config


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """speculators logs at import and at construction; its warnings are not ours to show."""
    logger = logging.getLogger("speculators")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
