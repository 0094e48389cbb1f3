# SPDX-License-Identifier: Apache-2.0
import pytest

from vllm_weaver.adapter import AdapterError, WeaverConfig

PUBLISHED = {
    "d_model": 5120,
    "d_embed": 5120,
    "d_rank": 2048,
    "num_layers": 1,
    "num_heads": 16,
    "mlp_dim": 2048,
    "K": 15,
    "candidate_pool_size": 512,
    "encoder_mode": 3,
    "score_head": 4,
}


def test_the_published_v1_dictionary_is_the_default_config():
    config = WeaverConfig.from_dict(PUBLISHED)
    assert config == WeaverConfig(d_model=5120, d_embed=5120)
    assert (config.variant, config.depth, config.activation) == ("v1", 15, "gelu")
    assert (config.head_dim, config.norm_eps) == (128, 1e-6)


@pytest.mark.parametrize(
    "extra",
    [
        {"rope_base": 500.0, "activation": "swiglu"},
        {"rope_base": 500.0, "activation": "silu"},
        {"rope_base": 500.0},
    ],
)
def test_v2_is_told_by_its_own_keys(extra):
    config = WeaverConfig.from_dict(PUBLISHED | extra)
    assert (config.variant, config.activation, config.rope_base) == ("v2", "swiglu", 500.0)


def test_tensors_decide_the_variant_where_the_dictionary_is_silent():
    assert WeaverConfig.from_dict(PUBLISHED, variant="v2").variant == "v2"


@pytest.mark.parametrize(
    "config",
    [
        WeaverConfig(d_model=8, d_embed=6, d_rank=32, activation="gelu_tanh", depth=3),
        WeaverConfig(
            d_model=8,
            d_embed=6,
            num_layers=3,
            variant="v2",
            rope_base=77.0,
            norm_eps=1e-5,
            vocab_size=90,
            target="a/target",
            drafter="a/drafter",
            drafter_block_size=16,
        ),
    ],
)
def test_to_dict_and_from_dict_are_inverse(config):
    data = config.to_dict()
    assert data["speculators_model_type"] == "weaver"
    assert WeaverConfig.from_dict(data) == config
    assert WeaverConfig.from_dict(data, variant=config.variant) == config


def test_keys_of_other_tools_are_let_pass():
    notes = {"transformers_version": "5", "metadata": {"step": 3}, "dtype": "float32"}
    assert WeaverConfig.from_dict(PUBLISHED | notes) == WeaverConfig.from_dict(PUBLISHED)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_experts": 4}, ("'num_experts'", "4", "unknown")),
        ({"K": 0}, ("depth", "0")),
        ({"K": True}, ("depth", "True")),
        ({"d_rank": 2.5}, ("d_rank", "2.5")),
        ({"d_rank": 2049}, ("2049", "num_heads 16")),
        ({"d_rank": 48, "variant": "v2"}, ("head_dim 3", "even")),
        ({"encoder_mode": 2}, ("encoder_mode", "2", "3")),
        ({"score_head": 1}, ("score_head", "1", "4")),
        ({"variant": "v3"}, ("'v3'", "'v1' or 'v2'")),
        ({"activation": "relu"}, ("'relu'", "'gelu' or 'gelu_tanh'")),
        ({"activation": "gelu", "rope_base": 1e4}, ("'gelu'", "v1", "rope_base", "v2")),
        ({"variant": "v1", "activation": "swiglu"}, ("v1", "'swiglu'", "v2")),
        ({"rope_base": -1.0}, ("rope_base", "-1.0")),
        ({"rope_base": float("nan")}, ("rope_base", "nan")),
        ({"norm_eps": "small"}, ("norm_eps", "'small'")),
        ({"vocab_size": -3}, ("vocab_size", "-3")),
        ({"drafter": 3}, ("drafter", "3")),
        ({"target_hidden_size": 4096}, ("4096", "5120")),
        ({"speculators_model_type": "eagle3"}, ("'eagle3'", "'weaver'")),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(change, words):
    with pytest.raises(AdapterError) as caught:
        WeaverConfig.from_dict(PUBLISHED | change)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("key", [key for key in PUBLISHED if key[:3] not in ("enc", "sco")])
def test_a_missing_size_is_refused_by_name(key):
    with pytest.raises(AdapterError, match=f"config key '{key}' is missing"):
        WeaverConfig.from_dict({name: PUBLISHED[name] for name in PUBLISHED if name != key})


def test_tensors_of_the_other_variant_are_refused():
    with pytest.raises(AdapterError, match="the tensors mean variant v1 but rope_base"):
        WeaverConfig.from_dict(PUBLISHED | {"rope_base": 1e4}, variant="v1")


def test_a_config_that_is_no_dictionary_is_refused():
    with pytest.raises(AdapterError, match="is a list"):
        WeaverConfig.from_dict([1, 2])
