# SPDX-License-Identifier: Apache-2.0
import json
import os
import pickle

import pytest
import safetensors.torch
import torch

from vllm_weaver.adapter import AdapterError, WeaverAdapter, checkpoint, describe, load, save

PUBLISHED_CONFIG = {
    "d_model": 12,
    "d_embed": 10,
    "d_rank": 16,
    "num_layers": 1,
    "num_heads": 2,
    "mlp_dim": 20,
    "K": 4,
    "candidate_pool_size": 6,
    "encoder_mode": 3,
    "score_head": 4,
}


def published_payload(adapter, **config):
    extra = {"rope_base": 10000.0, "activation": "swiglu"} if adapter.pos_emb is None else {}
    layers = {"num_layers": adapter.config.num_layers}
    return {
        "config": PUBLISHED_CONFIG | extra | layers | config,
        "state_dict": {name: value.clone() for name, value in adapter.state_dict().items()},
        "metadata": {"speculator_kind": "dflash_tfm_weaver"},
    }


def assert_same(adapter, other):
    assert other.config == adapter.config
    mine, theirs = adapter.state_dict(), other.state_dict()
    assert list(mine) == list(theirs)
    for name in mine:
        assert torch.equal(mine[name], theirs[name]), name


def refused(path, *words, **arguments):
    with pytest.raises(AdapterError) as caught:
        load(path, **arguments)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, (word, message)


@pytest.mark.parametrize(("variant", "num_layers"), [("v1", 1), ("v2", 1), ("v1", 2), ("v2", 2)])
def test_published_file_and_our_directory_hold_the_same_adapter(
    make_case, tmp_path, variant, num_layers
):
    case = make_case(variant, num_layers)
    file = tmp_path / "weaver.pth"
    torch.save(published_payload(case.adapter), file)
    first = load(file, target_width=12, vocab_size=40, depth=4)
    assert_same(case.adapter, first)
    assert first.metadata == {"speculator_kind": "dflash_tfm_weaver"}

    save(first, tmp_path / "ours", metadata={"steps": 3})
    for path in ("ours", "ours/model.safetensors", "ours/config.json"):
        second = load(tmp_path / path, target_width=12, depth=15)
        assert_same(case.adapter, second)
        assert second.metadata == {"steps": 3}
        assert not second.training

    torch.save(published_payload(second), file)
    assert_same(case.adapter, load(str(file)))
    path = torch.tensor([[1, 2]] * 3)
    assert torch.equal(
        case.adapter.score_children(*case.step, path, case.embed, case.lm_head),
        second.score_children(*case.step, path, case.embed, case.lm_head),
    )


def test_separate_projections_are_joined_in_the_order_q_k_v(make_case, tmp_path):
    case = make_case("v1", 2)
    payload = published_payload(case.adapter)
    for block in ("blocks.0.", "blocks.1."):
        rows = payload["state_dict"].pop(f"{block}qkv_proj.weight")
        for name, part in zip("qkv", rows.chunk(3), strict=True):
            payload["state_dict"][f"{block}{name}_proj.weight"] = part.clone()
    torch.save(payload, tmp_path / "apart.pth")
    assert_same(case.adapter, load(tmp_path / "apart.pth"))


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "weaver.net."])
def test_wrapper_prefixes_are_dropped(make_case, tmp_path, prefix):
    case = make_case("v2")
    payload = published_payload(case.adapter)
    payload["state_dict"] = {prefix + name: x for name, x in payload["state_dict"].items()}
    torch.save(payload, tmp_path / "wrapped.pth")
    assert_same(case.adapter, load(tmp_path / "wrapped.pth"))


def test_blocks_compiled_one_by_one_load_too(make_case, tmp_path):
    case = make_case("v2", 2)
    payload = published_payload(case.adapter)
    payload["state_dict"] = {
        name.replace("blocks.1.", "blocks.1._orig_mod."): value
        for name, value in payload["state_dict"].items()
    }
    torch.save(payload, tmp_path / "compiled.pth")
    assert_same(case.adapter, load(tmp_path / "compiled.pth"))


def test_a_foreign_safetensors_file_takes_its_config_from_beside_it(make_case, tmp_path):
    case = make_case("v1")
    safetensors.torch.save_file(case.adapter.state_dict(), tmp_path / "model.safetensors")
    refused(tmp_path, "model.safetensors", "no config", "config.json")
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED_CONFIG))
    assert_same(case.adapter, load(tmp_path))


def test_the_weights_alone_are_a_checkpoint(make_case, tmp_path):
    case = make_case("v1", activation="gelu_tanh")
    save(case.adapter, tmp_path)
    (tmp_path / "config.json").unlink()
    assert_same(case.adapter, load(tmp_path))


def test_activation_can_be_chosen_at_loading(make_case, tmp_path):
    case = make_case("v1")
    torch.save(published_payload(case.adapter), tmp_path / "a.pth")
    assert load(tmp_path / "a.pth").config.activation == "gelu"
    assert load(tmp_path / "a.pth", activation="gelu_tanh").blocks[0].activation == "gelu_tanh"
    refused(tmp_path / "a.pth", "a.pth", "'swiglu'", "v1", activation="swiglu")


def test_dtype_defaults_to_float32_on_a_cpu_and_can_be_chosen(make_case, tmp_path):
    case = make_case("v1")
    save(case.adapter, tmp_path, dtype=torch.bfloat16)
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.get_tensor("pos_emb").dtype == torch.bfloat16
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert {p.dtype for p in load(tmp_path).parameters()} == {torch.float32}
    low = load(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in low.parameters()} == {torch.bfloat16}
    assert torch.equal(low.pos_emb, case.adapter.pos_emb.bfloat16())


def test_config_json_is_in_speculators_form(make_case, tmp_path):
    case = make_case("v2")
    save(case.adapter, tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())
    assert record["speculators_model_type"] == "weaver"
    assert record["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert (record["K"], record["variant"], record["d_model"]) == (4, "v2", 12)


def test_wrong_target_is_refused(make_case, tmp_path):
    case = make_case("v1")
    file = tmp_path / "a.pth"
    torch.save(published_payload(case.adapter), file)
    refused(file, "a.pth", "output_norm.weight", "(12,)", "(16,)", "trained for", target_width=16)
    torch.save(published_payload(case.adapter, vocab_size=40), file)
    load(file, vocab_size=40)
    refused(file, "a.pth", "40", "41", "trained for", vocab_size=41)
    refused(file, "a.pth", "pos_emb", "(4, 16)", "gives 3", "block size 5", depth=3)
    torch.save(published_payload(make_case("v2").adapter), file)
    refused(file, "a.pth", "config K is 4", "gives 3", depth=3)


def damage(name, change):
    def apply(payload):
        payload["state_dict"][name] = change(payload["state_dict"][name])

    return apply


def poison(value):
    def apply(tensor):
        tensor.view(-1)[3] = value
        return tensor

    return apply


def drop(name):
    return lambda payload: payload["state_dict"].pop(name)


def put(name, value):
    return lambda payload: payload["state_dict"].update({name: value})


def split_q(payload):
    state = payload["state_dict"]
    q, k, v = state.pop("blocks.0.qkv_proj.weight").chunk(3)
    state |= {"blocks.0.q_proj.weight": q.clone(), "blocks.0.k_proj.weight": k.clone()}
    return state, v


def split_misshaped(payload):
    state, v = split_q(payload)
    state["blocks.0.v_proj.weight"] = v[:3].clone()


def split_and_joined(payload):
    state, v = split_q(payload)
    state["blocks.0.v_proj.weight"] = v.clone()
    state["blocks.0.qkv_proj.weight"] = torch.zeros(48, 16)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (damage("token_in.weight", lambda x: x[:, :9].clone()), ("(16, 9)", "(16, 10)")),
        (
            damage("output_norm.bias", lambda x: x[:5].clone()),
            ("output_norm.bias", "(5,)", "(12,)"),
        ),
        (damage("pos_emb", lambda x: x[:3].clone()), ("pos_emb", "(3, 16)", "(4, 16)")),
        (damage("blocks.0.fc1.weight", lambda x: x.t().clone()), ("(16, 20)", "(20, 16)")),
        (damage("blocks.0.o_proj.weight", poison(float("nan"))), ("o_proj.weight (16, 16)", "NaN")),
        (damage("out_norm.weight", poison(float("-inf"))), ("out_norm.weight (16,)", "Inf")),
        (damage("out_norm.weight", lambda x: x.to(torch.int8)), ("out_norm.weight", "torch.int8")),
        (damage("out_norm.weight", lambda x: 3.0), ("out_norm.weight", "float")),
        (drop("lm_head_query_in.weight"), ("lm_head_query_in.weight (12, 16) is missing",)),
        (drop("pos_emb"), ("pos_emb (4, 16) is missing",)),
        (drop("blocks.0.qkv_proj.weight"), ("blocks.0.qkv_proj.weight (48, 16) is missing",)),
        (put("blocks.1.o_proj.weight", torch.ones(16, 16)), ("blocks.1.o_proj.weight (16, 16)",)),
        (put("extra", torch.ones(2)), ("extra (2,)", "not part")),
        (put("module.token_in.bias", torch.ones(16)), ("token_in.bias is stored twice",)),
        (put("blocks.0.gate_up_proj.weight", torch.ones(40, 16)), ("both", "fc1", "gate_up_proj")),
        (split_q, ("blocks.0.v_proj.weight is missing", "(16, 16)")),
        (split_misshaped, ("blocks.0.v_proj.weight", "(3, 16)", "(16, 16)")),
        (split_and_joined, ("both", "q_proj.weight", "qkv_proj.weight")),
        (lambda p: p["state_dict"].clear(), ("neither",)),
        (lambda p: p["config"].update(d_rank=32), ("pos_emb", "(4, 16)", "(4, 32)")),
        (
            lambda p: p["config"].update(num_layers=2),
            ("blocks.1.norm_attn.weight (16,) is missing",),
        ),
        (lambda p: p["config"].update(rope_base=1e4), ("the tensors", "v1", "rope_base", "v2")),
        (lambda p: p["config"].update(dropout_kind="x"), ("unknown config key 'dropout_kind'",)),
        (lambda p: p["config"].update(encoder_mode=1), ("encoder_mode is 1",)),
        (lambda p: p["config"].pop("mlp_dim"), ("'mlp_dim' is missing",)),
        (lambda p: p["metadata"].update(speculator_kind="eagle"), ("'eagle'", "dflash_tfm_weaver")),
        (lambda p: p.pop("state_dict"), ("'state_dict'", "config, metadata")),
        (lambda p: p.pop("config"), ("'config'",)),
    ],
)
def test_a_spoilt_published_file_is_refused_by_name(make_case, tmp_path, spoil, words):
    payload = published_payload(make_case("v1").adapter)
    spoil(payload)
    file = tmp_path / "spoilt.pth"
    torch.save(payload, file)
    refused(file, str(file), *words)


class Trap:
    def __reduce__(self):
        return (os.mkdir, ("trap-was-sprung",))


def test_pickled_code_is_not_run(make_case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    payload = published_payload(make_case("v1").adapter)
    payload["metadata"]["trap"] = Trap()
    torch.save(payload, "trap.pth")
    refused("trap.pth", "trap.pth", "not a readable checkpoint")
    assert not os.path.exists("trap-was-sprung")


def test_files_that_are_no_checkpoint_are_refused(make_case, tmp_path):
    file = tmp_path / "a.pth"
    refused(file, "a.pth", "no such file")
    refused(tmp_path, str(tmp_path), "model.safetensors")
    torch.save(published_payload(make_case("v1").adapter), file)
    whole = file.read_bytes()
    for content in (b"", b"not a checkpoint", whole[: len(whole) // 2], whole[:-1], whole[200:]):
        file.write_bytes(content)
        refused(file, "a.pth", "not a readable checkpoint")
    file.write_bytes(pickle.dumps({"config": 1}, protocol=2))
    refused(file, "a.pth")
    torch.save([1, 2], file)
    refused(file, "a.pth", "list")


def test_a_spoilt_directory_is_refused(make_case, tmp_path):
    case = make_case("v1")
    save(case.adapter, tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    record = json.loads(config.read_text())

    config.write_text("{")
    refused(tmp_path, str(config), "not JSON")
    config.write_bytes(b"\xff\xfe\x00")
    refused(tmp_path, str(config), "not readable text")
    config.write_text("[]")
    refused(tmp_path, str(config), "list")
    config.write_text(json.dumps(record | {"activation": "gelu_tanh"}))
    refused(tmp_path, "config.json", "activation", "'gelu_tanh'", "'gelu'", "delete config.json")
    config.write_text(json.dumps(record))

    whole = weights.read_bytes()
    for content in (b"", whole[:100], whole[:-1], b"\xff" * 8 + whole[8:]):
        weights.write_bytes(content)
        refused(tmp_path, str(weights), "not a readable safetensors file")

    tensors = case.adapter.state_dict() | {"pos_emb": torch.zeros(5, 16)}
    safetensors.torch.save_file(tensors, weights)
    refused(tmp_path, str(weights), "pos_emb", "(5, 16)", "(4, 16)")


@pytest.mark.parametrize("moment", ["write weights", "name weights", "write config", "name config"])
def test_a_save_that_fails_at_any_moment_leaves_a_checkpoint(
    make_case, tmp_path, monkeypatch, moment
):
    old, new = make_case("v1", seed=1).adapter, make_case("v1", seed=2).adapter
    save(old, tmp_path, metadata={"step": 1})
    action, _, what = moment.partition(" ")
    wanted = "model.safetensors" if what == "weights" else "config.json"
    replace_file, rename = checkpoint._replace_file, os.replace

    def half_written(path, write):
        def full_disk(temporary):
            temporary.write_bytes(b"half")
            raise OSError(28, "No space left on device")

        replace_file(path, full_disk if path.name == wanted else write)

    def interrupted(source, target):
        if os.path.basename(target) == wanted:
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patch:
        if action == "write":
            patch.setattr(checkpoint, "_replace_file", half_written)
        else:
            patch.setattr(os, "replace", interrupted)
        with pytest.raises((OSError, KeyboardInterrupt)):
            save(new, tmp_path, metadata={"step": 2})
    survivor = load(tmp_path)
    written = what == "config"
    assert_same(new if written else old, survivor)
    assert survivor.metadata == {"step": 2 if written else 1}
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]
    save(new, tmp_path)
    assert_same(new, load(tmp_path))


def test_a_diverged_adapter_is_not_saved_over_a_good_one(make_case, tmp_path):
    adapter = make_case("v1").adapter
    save(adapter, tmp_path)
    good = load(tmp_path)
    with torch.no_grad():
        adapter.blocks[0].fc1.bias[2] = float("nan")
    with pytest.raises(AdapterError, match=r"blocks\.0\.fc1\.bias \(20,\) holds NaN"):
        save(adapter, tmp_path)
    assert_same(good, load(tmp_path))


def test_metadata_that_is_not_json_is_refused_before_anything_is_written(make_case, tmp_path):
    adapter = make_case("v1").adapter
    for value in (object(), float("nan")):
        with pytest.raises(AdapterError, match="not JSON"):
            save(adapter, tmp_path / "new", metadata={"x": value})
    assert not (tmp_path / "new").exists()


def test_describe_tells_the_same_of_an_adapter_and_of_its_files(make_case, tmp_path):
    adapter = make_case("v2", 2).adapter
    facts = describe(adapter)
    assert facts["parameters"] == sum(p.numel() for p in adapter.parameters())
    assert (facts["variant"], facts["depth"], facts["layers"]) == ("v2", 4, 2)
    assert "vocab_size" not in facts
    save(adapter, tmp_path)
    assert describe(tmp_path) == {"path": str(tmp_path)} | facts
    json.dumps(facts)


def test_loaded_adapters_can_be_trained_on(make_case, tmp_path):
    save(make_case("v1").adapter, tmp_path)
    adapter = load(tmp_path)
    assert isinstance(adapter, WeaverAdapter)
    assert all(parameter.requires_grad for parameter in adapter.parameters())
