# SPDX-License-Identifier: Apache-2.0
"""Expansion keeps the function: float32, the small models against the large ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.expand.adapter import expand_adapter
from benchmarks.expand.drafter import drafter_tensors
from benchmarks.expand.filler import Filler
from benchmarks.expand.scales import layer_places, rotary_map, spread, stream
from benchmarks.expand.shapes import (
    QWEN36_27B,
    TWICE_NANO,
    Attention,
    DrafterShape,
    Gdn,
    Large,
    ShapeError,
    TargetShape,
    parameters,
)
from benchmarks.expand.target import TargetPlan, target_tensors
from benchmarks.expand.trio import Trio, expanded_tensors, read_config, read_weights, stored_names
from vllm_weaver.adapter import WeaverAdapter, WeaverConfig

NANO = Path(__file__).parents[2] / "vllm_weaver/demo/models"
TOLERANCE = 1e-4

# Every count and dimension grows, groups change their size, and heads their width.
LARGE = Large(
    name="test",
    width=160,
    layers=8,
    mlp=96,
    vocab=257,
    attention=Attention(heads=6, kv_heads=3, head_dim=64, rotary=32),
    gdn=Gdn(key_heads=3, value_heads=9, key_dim=48, value_dim=32),
    max_positions=256,
    drafter_layers=3,
    drafter_mlp=80,
    drafter_attention=Attention(heads=8, kv_heads=4, head_dim=64, rotary=64),
    drafter_inputs=3,
    rank=96,
    rank_heads=4,
    rank_mlp=72,
)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


def random_target(directory: Path) -> Any:
    """A target whose norms, epsilon and gates all matter, and which is not tied."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        vocab_size=200,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_conv_kernel_dim=4,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        layer_types=["linear_attention", "full_attention"] * 2,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 100.0,
            "partial_rotary_factor": 0.25,
        },
        rms_norm_eps=1e-2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "A_log" in name:
                parameter.uniform_(-1, 2)
            elif parameter.ndim >= 2:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
            else:
                parameter.normal_(mean=1.0 if "linear_attn.norm" in name else 0.0, std=0.5)
    model.save_pretrained(directory)
    return model


def random_drafter(directory: Path) -> None:
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(3)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * 1.5 * columns**-0.5

    weights = {"fc.weight": matrix(64, 128)}
    for i in range(2):
        attention, mlp = f"layers.{i}.self_attn.", f"layers.{i}.mlp."
        weights |= {
            attention + "q_proj.weight": matrix(4 * 32, 64),
            attention + "k_proj.weight": matrix(2 * 32, 64),
            attention + "v_proj.weight": matrix(2 * 32, 64),
            attention + "o_proj.weight": matrix(64, 4 * 32),
            mlp + "gate_proj.weight": matrix(48, 64),
            mlp + "up_proj.weight": matrix(48, 64),
            mlp + "down_proj.weight": matrix(64, 48),
        }
        for name, size in (
            ("self_attn.q_norm", 32),
            ("self_attn.k_norm", 32),
            ("input_layernorm", 64),
            ("post_attention_layernorm", 64),
        ):
            weights[f"layers.{i}.{name}.weight"] = 1 + 0.3 * matrix(1, size)[0] * size**0.5
    for name in ("hidden_norm", "norm"):
        weights[f"{name}.weight"] = 1 + 0.3 * matrix(1, 64)[0] * 8
    directory.mkdir()
    save_file(weights, directory / "model.safetensors")
    config = {
        **json.loads((NANO / "drafter/config.json").read_text()),
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-2,
        "rope_theta": 100.0,
        "dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 2]},
        "block_size": 4,
    }
    (directory / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module", params=["random", "nano"])
def trio(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trio:
    if request.param == "nano":
        return Trio.below(NANO, TWICE_NANO)
    root = tmp_path_factory.mktemp("small")
    random_target(root / "target")
    random_drafter(root / "drafter")
    return Trio.below(root, LARGE)


@pytest.fixture(scope="module")
def large(trio: Trio, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The expanded models, whole, in float32."""
    out = tmp_path_factory.mktemp("large")
    trio.write(out, torch.float32, whole=True)
    return out


@pytest.fixture(scope="module")
def passes(trio: Trio, large: Path) -> tuple[Any, Any, Tensor]:
    """Both targets' outputs over the same tokens."""
    from transformers import Qwen3_5ForCausalLM

    vocab = read_config(trio.target)["vocab_size"]
    ids = torch.randint(2, vocab, (2, 40), generator=torch.Generator().manual_seed(1))
    found = []
    for directory in (trio.target, large / "target"):
        model = Qwen3_5ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        with torch.inference_mode():
            found.append(model(ids, output_hidden_states=True))
    return found[0], found[1], ids


def test_logits_are_the_small_targets(passes: tuple[Any, Any, Tensor]) -> None:
    small, big, _ = passes
    vocab = small.logits.shape[-1]
    assert relative(big.logits[..., :vocab], small.logits) < TOLERANCE
    assert torch.equal(big.logits.argmax(-1), small.logits.argmax(-1))


def test_unused_tokens_have_no_mass_at_any_temperature(passes: tuple[Any, Any, Tensor]) -> None:
    small, big, _ = passes
    vocab = small.logits.shape[-1]
    assert big.logits.shape[-1] > vocab
    for temperature in (0.1, 1.0, 10.0):
        mass = (big.logits / temperature).softmax(-1)[..., vocab:]
        assert float(mass.max()) == 0
    assert bool(torch.isfinite(big.logits).all())


def test_hidden_states_are_padded_and_keep_the_constant(
    trio: Trio, passes: tuple[Any, Any, Tensor]
) -> None:
    small, big, _ = passes
    plan, _ = trio.plans()
    d, scale = plan.small.width, plan.stream.scale
    for i, place in enumerate(plan.places[:-1]):
        got, want = big.hidden_states[place + 1], small.hidden_states[i + 1]
        assert relative(got[..., :d], scale * want) < TOLERANCE
        assert float(got[..., d:-1].abs().max()) == 0
        assert torch.allclose(got[..., -1], torch.tensor(plan.stream.constant))


def dflash(directory: Path, auxiliary: Tensor, ids: Tensor, embedding: Tensor) -> Tensor:
    """States of the drafter's block after the last token, by the testbed's own forward pass."""
    from benchmarks.testbed import config as testbed
    from benchmarks.testbed.drafter import Drafter

    config = read_config(directory)
    shape = DrafterShape.of(config)
    a = shape.attention
    drafter = testbed.DrafterShape(
        shape.layers, shape.mlp, shape.target_layers, config["block_size"]
    )
    target = replace(
        testbed.NANO.target,
        width=shape.width,
        heads=a.heads,
        kv_heads=a.kv_heads,
        head_dim=a.head_dim,
        eps=shape.eps,
        rope_theta=config["rope_theta"],
    )
    model = Drafter(read_weights(directory), drafter, target, "cpu", torch.float32)
    anchors = torch.full((ids.shape[0], 1), ids.shape[1] - 1)
    return model(auxiliary, ids, anchors, embedding)[:, 0]


def test_drafter_marginals_are_the_small_drafters(
    trio: Trio, large: Path, passes: tuple[Any, Any, Tensor]
) -> None:
    small, big, ids = passes
    found = []
    for directory, output, target in (
        (trio.drafter, small, trio.target),
        (large / "drafter", big, large / "target"),
    ):
        layers = read_config(directory)["dflash_config"]["target_layer_ids"]
        auxiliary = torch.cat([output.hidden_states[i + 1] for i in layers], dim=-1)
        weights = read_weights(target)
        embedding = weights["model.embed_tokens.weight"].float()
        head = weights.get("lm_head.weight", embedding).float()
        found.append(dflash(directory, auxiliary, ids, embedding) @ head.T)
    vocab = found[0].shape[-1]
    assert relative(found[1][..., :vocab], found[0]) < TOLERANCE
    assert float((found[1] / 10).softmax(-1)[..., vocab:].max()) == 0


def test_light_and_whole_directories_hold_the_same_tensors(
    trio: Trio, large: Path, tmp_path: Path
) -> None:
    trio.write(tmp_path, torch.float32, whole=False)
    fill = Filler(torch.device("cpu"), torch.float32)
    for part in ("target", "drafter"):
        whole = read_weights(large / part)
        assert stored_names(large / part) == set(whole)
        seen = set()
        for name, tensor in expanded_tensors(tmp_path / part, fill):
            assert torch.equal(tensor, whole[name]), name
            seen.add(name)
        assert seen == set(whole)


def adapter_inputs(plan: TargetPlan) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """States, pools and matrices of the small pair, and the same as the large pair has them."""
    generator = torch.Generator().manual_seed(7)
    small, big = plan.small, plan.large
    d = small.width

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    spare = 3e-3  # the final norm's constant, which varies with the state
    want = {
        "h_ver_Rd": normal(2, d),
        "h_draft_RDd": normal(2, 5, d),
        "embed_Vd": 0.05 * normal(small.vocab, d),
        "lm_head_Vd": normal(small.vocab, d) * d**-0.5,
    }
    got = {name: F.pad(x, (0, big.width - d)) for name, x in want.items()}
    got["h_ver_Rd"][..., -1] = spare
    got["h_draft_RDd"][..., -1] = 2 * spare
    got["embed_Vd"] = got["embed_Vd"] * plan.stream.scale
    got["embed_Vd"][..., -1] = plan.stream.constant
    got["lm_head_Vd"][:, d:-1] = normal(small.vocab, big.width - d - 1)
    shared = {
        "candidate_ids_RDP": torch.randint(0, small.vocab, (2, 5, 24), generator=generator),
        "candidate_logits_RDP": normal(2, 5, 24),
        "path_tokens_RN": torch.randint(0, small.vocab, (2, 4), generator=generator),
    }
    return want | shared, got | shared


@pytest.mark.parametrize("variant", ["v1", "v2"])
def test_adapter_scores_are_the_small_adapters(variant: Any) -> None:
    nano = TargetShape.of(read_config(NANO / "target"))
    small_shape = replace(nano, width=64, layer_types=nano.layer_types[:4], vocab=200, mlp=48)
    large = replace(TWICE_NANO, width=160, layers=8, mlp=96, rank=128, rank_heads=4, rank_mlp=72)
    plan = TargetPlan(small_shape, large)
    config = WeaverConfig(
        d_model=64, d_embed=64, d_rank=32, num_layers=2, num_heads=2, mlp_dim=48, depth=5,
        candidate_pool_size=24, variant=variant, vocab_size=200,
    )  # fmt: skip
    torch.manual_seed(0)
    small = WeaverAdapter(config)
    with torch.no_grad():
        for parameter in small.parameters():
            offset = 1.0 if parameter.ndim == 1 else 0.0
            parameter.normal_(std=0.3 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5)
            parameter.add_(offset)
    fill = Filler(torch.device("cpu"), torch.float32)
    big = expand_adapter(small, plan, fill, large)
    assert big.config.d_rank == 128 and big.config.vocab_size == TWICE_NANO.vocab
    want, got = adapter_inputs(plan)
    with torch.inference_mode():
        expected, found = small.score_children(**want), big.score_children(**got)
    assert float(expected.std()) > 0.3
    assert float((found - expected).abs().max()) < TOLERANCE


def test_a_padded_norm_divides_as_the_small_one_does() -> None:
    carried = stream(48, 200, 1e-2, 4e-3)
    h = 0.1 * torch.randn(7, 48, dtype=torch.float64)
    padded = F.pad(carried.scale * h, (0, 152))
    padded[:, -1] = carried.constant
    want = F.rms_norm(h, (48,), eps=1e-2)
    got = F.rms_norm(padded, (200,), eps=carried.eps) * carried.gain
    assert torch.allclose(got[:, :48], want, rtol=1e-12)


def test_places_of_layers_keep_kind_and_order() -> None:
    kinds = ("g", "g", "g", "a")
    places = layer_places(kinds * 2, kinds * 16)
    assert places == sorted(set(places)) and places[0] == 0
    assert [(kinds * 16)[i] for i in places] == list(kinds * 2)
    assert places[-1] == 63
    with pytest.raises(ShapeError, match="cannot hold"):
        layer_places(kinds * 2, kinds)


def test_query_heads_stay_with_a_copy_of_their_key() -> None:
    # Four query heads a key, spread over keys that serve two: each small key appears twice.
    pairs = spread(8, 8, 2, 4)
    assert [small // 4 for _, small in sorted(pairs)] == [0, 0, 0, 0, 1, 1, 1, 1]
    with pytest.raises(ShapeError, match="do not fit"):
        spread(8, 8, 4, 4 // 2)


def test_rotary_pairs_keep_their_frequencies() -> None:
    small, big = Attention(1, 1, 32, 8), Attention(1, 1, 64, 16)
    channels = rotary_map(small, big)
    assert len(set(channels)) == 32
    for i in range(4):
        assert channels[i] / 8 == i / 4  # exponent of the base
        assert channels[i + 4] == channels[i] + 8
    with pytest.raises(ShapeError, match="rotary"):
        rotary_map(Attention(1, 1, 32, 24), big)


def test_the_27b_shape_has_the_27bs_size_and_takes_the_nano_models() -> None:
    counts = parameters(QWEN36_27B)
    # Embedding rows are read one at a time: a step reads the rest, 51.25 GB of the target.
    read = 2 * (counts["target_layers"] + QWEN36_27B.vocab * QWEN36_27B.width)
    assert read == pytest.approx(51.25e9, rel=0.005)
    assert counts["drafter"] == pytest.approx(1.73e9, rel=0.01)
    target, drafter = Trio.below(NANO, QWEN36_27B).plans()
    assert target.layer_types.count("full_attention") == 16
    assert len(drafter.inputs) == 5
    assert set(target.places[i] for i in drafter.small.target_layers) <= set(drafter.inputs)


class EmptyFiller(Filler):
    """Shapes without the work: nothing is drawn or cleared, so few pages are touched."""

    def normal(self, name: str, *shape: int, **_: float) -> Tensor:
        return torch.empty(shape, dtype=self.dtype)

    uniform = normal

    def full(self, *shape: int, value: float = 0.0) -> Tensor:
        return torch.empty(shape, dtype=self.dtype)


def test_the_27bs_tensors_are_those_of_its_architecture() -> None:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    large = replace(QWEN36_27B, vocab=8192, layers=8)
    trio = Trio.below(NANO, large)
    target, drafter = trio.plans()
    fill = EmptyFiller(torch.device("cpu"), torch.bfloat16)
    with torch.device("meta"):
        config = Qwen3_5TextConfig(**target.config(read_config(trio.target)))
        wanted = Qwen3_5ForCausalLM(config).state_dict()
    shapes = {}
    for name, tensor in target_tensors(target, read_weights(trio.target), fill):
        assert name not in shapes
        shapes[name] = tuple(tensor.shape)
    assert shapes == {name: tuple(tensor.shape) for name, tensor in wanted.items()}
    drafted = {}
    for name, tensor in drafter_tensors(drafter, read_weights(trio.drafter), fill):
        drafted[name] = tuple(tensor.shape)
    assert drafted["fc.weight"] == (5120, 5 * 5120)
    assert drafted["layers.4.self_attn.q_proj.weight"] == (32 * 128, 5120)
    assert drafted["layers.4.self_attn.v_proj.weight"] == (8 * 128, 5120)
    assert drafted["layers.0.mlp.down_proj.weight"] == (5120, 17408)
    assert len(drafted) == 3 + 5 * 11


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ShapeError, match="vocab"):
        Trio.below(NANO, replace(TWICE_NANO, vocab=100)).plans()
    with pytest.raises(ShapeError, match="spare"):
        Trio.below(NANO, replace(TWICE_NANO, width=256)).plans()
