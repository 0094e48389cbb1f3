# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from vllm_weaver.adapter import AdapterError, WeaverAdapter, WeaverConfig, pool_log_probs

SHAPES = [("v1", 1), ("v2", 1), ("v1", 2), ("v2", 2)]

COMMON = {
    "output_norm.weight": (5120,),
    "output_norm.bias": (5120,),
    "proposal_in.weight": (2048, 5120),
    "proposal_in.bias": (2048,),
    "embed_norm.weight": (5120,),
    "embed_norm.bias": (5120,),
    "token_in.weight": (2048, 5120),
    "token_in.bias": (2048,),
    "blocks.0.norm_attn.weight": (2048,),
    "blocks.0.norm_attn.bias": (2048,),
    "blocks.0.qkv_proj.weight": (6144, 2048),
    "blocks.0.o_proj.weight": (2048, 2048),
    "blocks.0.norm_mlp.weight": (2048,),
    "blocks.0.norm_mlp.bias": (2048,),
    "out_norm.weight": (2048,),
    "out_norm.bias": (2048,),
    "lm_head_query_in.weight": (5120, 2048),
}
PUBLISHED = {
    "v1": COMMON
    | {
        "blocks.0.fc1.weight": (2048, 2048),
        "blocks.0.fc1.bias": (2048,),
        "blocks.0.fc2.weight": (2048, 2048),
        "blocks.0.fc2.bias": (2048,),
        "pos_emb": (15, 2048),
    },
    "v2": COMMON
    | {
        "blocks.0.gate_up_proj.weight": (4096, 2048),
        "blocks.0.gate_up_proj.bias": (4096,),
        "blocks.0.down_proj.weight": (2048, 2048),
        "blocks.0.down_proj.bias": (2048,),
    },
}


@pytest.mark.parametrize(("variant", "count"), [("v1", 56_694_784), ("v2", 60_860_416)])
def test_names_shapes_and_count_are_the_published_ones(variant, count):
    config = WeaverConfig(d_model=5120, d_embed=5120, variant=variant)
    adapter = WeaverAdapter(config, device="meta")
    shapes = {name: tuple(tensor.shape) for name, tensor in adapter.state_dict().items()}
    assert shapes == PUBLISHED[variant]
    assert sum(parameter.numel() for parameter in adapter.parameters()) == count


@pytest.mark.parametrize(("variant", "num_layers"), SHAPES)
def test_score_children_equals_the_row_by_row_definition(make_case, oracle, variant, num_layers):
    case = make_case(variant, num_layers)
    for length in range(1, 5):
        paths = torch.randint(40, (3, length))
        scores = case.adapter.score_children(*case.step, paths, case.embed, case.lm_head)
        assert scores.dtype == torch.float32
        for request in range(3):
            expected = oracle(case, request, paths[request].tolist())
            torch.testing.assert_close(scores[request].double(), expected, atol=2e-5, rtol=0)


def test_tanh_gelu_is_a_different_function_and_equals_its_definition(make_case, oracle):
    exact, tanh = make_case("v1"), make_case("v1", activation="gelu_tanh")
    path = torch.tensor([[3, 7]] * 3)
    scores = [
        case.adapter.score_children(*case.step, path, case.embed, case.lm_head)
        for case in (exact, tanh)
    ]
    assert not torch.equal(scores[0], scores[1])
    torch.testing.assert_close(scores[1][2].double(), oracle(tanh, 2, [3, 7]), atol=2e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_score_children_is_float32_whatever_the_inputs_are(make_case, dtype):
    case = make_case("v2")
    path = torch.tensor([[1, 2, 3]] * 3)
    rounded = [x.to(torch.bfloat16) for x in (case.h_ver, case.h_draft, case.embed, case.lm_head)]
    case.adapter.to(torch.bfloat16).to(dtype)
    h_ver, h_draft, embed, lm_head = (x.to(dtype) for x in rounded)
    scores = case.adapter.score_children(
        h_ver, h_draft, case.ids, case.logits, path, embed, lm_head
    )
    case.adapter.to(torch.float32)
    h_ver, h_draft, embed, lm_head = (x.float() for x in rounded)
    expected = case.adapter.score_children(
        h_ver, h_draft, case.ids, case.logits, path, embed, lm_head
    )
    assert scores.dtype == torch.float32
    assert torch.equal(scores, expected)


@pytest.mark.parametrize(("variant", "num_layers"), SHAPES)
def test_forward_gives_the_query_of_every_prefix_of_the_path(make_case, variant, num_layers):
    case = make_case(variant, num_layers)
    tokens = torch.randint(40, (3, 4))
    queries = case.adapter(case.h_ver, case.h_draft, tokens, case.embed)
    assert queries.shape == (3, 4, 12)
    rows = case.lm_head[case.ids.long()]
    scores = pool_log_probs(case.ids, case.logits, torch.einsum("rkpd,rkd->rkp", rows, queries))
    for length in range(1, 5):
        expected = case.adapter.score_children(
            *case.step, tokens[:, :length], case.embed, case.lm_head
        )
        torch.testing.assert_close(scores[:, length - 1], expected, atol=2e-5, rtol=0)


def test_forward_takes_an_embedding_module_as_well_as_its_matrix(make_case):
    case = make_case("v1")
    tokens = torch.randint(40, (3, 4))
    module = torch.nn.Embedding.from_pretrained(case.embed)
    assert torch.equal(
        case.adapter(case.h_ver, case.h_draft, tokens, module),
        case.adapter(case.h_ver, case.h_draft, tokens, case.embed),
    )


@pytest.mark.parametrize(("variant", "num_layers"), SHAPES)
def test_gradients_are_right_and_reach_every_parameter(make_case, variant, num_layers):
    case = make_case(variant, num_layers, requests=2, depth=3)
    adapter = case.adapter.double()
    tokens = torch.randint(40, (2, 3))
    names = [name for name, _ in adapter.named_parameters()]

    def loss(h_ver, h_draft, *parameters):
        queries = torch.func.functional_call(
            adapter,
            dict(zip(names, parameters, strict=True)),
            (h_ver, h_draft, tokens, case.embed.double()),
        )
        rows = case.lm_head.double()[case.ids.long()]
        correction = torch.einsum("rkpd,rkd->rkp", rows, queries)
        return (case.logits.double() + correction).log_softmax(-1)[..., 0].sum()

    inputs = [case.h_ver.double(), case.h_draft.double()]
    inputs += [parameter.detach().clone() for parameter in adapter.parameters()]
    inputs = [value.requires_grad_() for value in inputs]
    assert torch.autograd.gradcheck(loss, inputs, fast_mode=True)
    for name, gradient in zip(
        ["h_ver", "h_draft", *names], torch.autograd.grad(loss(*inputs), inputs), strict=True
    ):
        assert gradient.abs().max() > 0, name


def test_training_under_bfloat16_autocast_stays_finite_and_close(make_case):
    case = make_case("v2", 2)
    tokens = torch.randint(40, (3, 4))
    full = case.adapter(case.h_ver, case.h_draft, tokens, case.embed)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = case.adapter(case.h_ver, case.h_draft, tokens, case.embed)
    mixed.float().square().sum().backward()
    assert (mixed.float() - full).norm() < 0.03 * full.norm()
    for name, parameter in case.adapter.named_parameters():
        assert torch.isfinite(parameter.grad).all(), name


def test_zero_and_huge_hidden_states_give_finite_values_and_gradients(make_case):
    case = make_case("v1")
    tokens = torch.randint(40, (3, 4))
    h_ver = torch.zeros_like(case.h_ver).requires_grad_()
    h_draft = (case.h_draft * 1e4).requires_grad_()
    queries = case.adapter(h_ver, h_draft, tokens, case.embed)
    queries.sum().backward()
    for value in (queries, h_ver.grad, h_draft.grad):
        assert torch.isfinite(value).all()


def test_a_new_adapter_scores_the_drafters_marginals(make_case):
    case = make_case("v1")
    case.adapter.reset_parameters()
    path = torch.tensor([[1, 2]] * 3)
    scores = case.adapter.score_children(*case.step, path, case.embed, case.lm_head)
    assert torch.equal(scores, case.logits[:, 1].log_softmax(-1))


def test_padding_gets_no_mass_and_its_contents_do_not_matter(make_case, oracle):
    case = make_case("v1")
    case.ids[0, 1, 4:] = -1
    case.logits[0, 1, 4:] = float("nan")
    case.ids[1, 1] = -1
    path = torch.tensor([[1, 2]] * 3)
    scores = case.adapter.score_children(*case.step, path, case.embed, case.lm_head)
    assert (scores[0, 4:] == -torch.inf).all()
    torch.testing.assert_close(scores[0].exp().sum(), torch.tensor(1.0))
    assert (scores[1] == -torch.inf).all()
    case.logits[0, 1, 4:] = 5.0
    torch.testing.assert_close(scores[0].double(), oracle(case, 0, [1, 2]), atol=2e-5, rtol=0)


def test_padding_passes_no_gradient():
    ids = torch.tensor([[3, 5, -1], [-1, -1, -1]])
    logits = torch.tensor([[0.5, 1.0, float("nan")], [1.0, 2.0, 3.0]], requires_grad=True)
    correction = torch.zeros(2, 3, requires_grad=True)
    pool_log_probs(ids, logits, correction)[0, 0].backward()
    for gradient in (logits.grad, correction.grad):
        assert torch.isfinite(gradient).all()
        assert (gradient[ids < 0] == 0).all()


@pytest.mark.parametrize("variant", ["v1", "v2"])
def test_depth_one_and_pool_one(make_case, oracle, variant):
    case = make_case(variant, depth=1, pool=1)
    path = torch.tensor([[1], [2], [3]])
    scores = case.adapter.score_children(*case.step, path, case.embed, case.lm_head)
    assert torch.equal(scores, torch.zeros(3, 1))
    case = make_case(variant, depth=1, pool=5)
    scores = case.adapter.score_children(*case.step, path, case.embed, case.lm_head)
    torch.testing.assert_close(scores[1].double(), oracle(case, 1, [2]), atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"path": torch.zeros(3, 0, dtype=torch.int32)}, ("(3, 0)", "1 (the root) to 4")),
        ({"path": torch.zeros(3, 5, dtype=torch.int32)}, ("(3, 5)", "1 (the root) to 4")),
        ({"path": torch.zeros(2, 1, dtype=torch.int32)}, ("(2, 1)", "(3, N)")),
        ({"path": torch.full((3, 1), 40)}, ("path_tokens_RN", "40", "[0, 40)")),
        ({"ids": torch.full((3, 4, 6), 99)}, ("candidate_ids_RDP", "99", "[-1, 40)")),
        ({"ids": torch.zeros(3, 3, 6, dtype=torch.int32)}, ("(3, 3, 6)", "(3, 4, P)")),
        ({"logits": torch.zeros(3, 4, 5)}, ("(3, 4, 5)", "(3, 4, 6)")),
        ({"logits": torch.zeros(3, 4, 0), "ids": torch.zeros(3, 4, 0)}, ("(3, 4, 0)",)),
        ({"h_ver": torch.zeros(3, 8)}, ("(3, 8)", "output_norm.weight", "(12,)")),
        ({"h_draft": torch.zeros(3, 3, 12)}, ("(3, 3, 12)", "(3, 4, 12)")),
        ({"embed": torch.zeros(40, 9)}, ("(40, 9)", "embed_norm.weight", "10")),
        ({"lm_head": torch.zeros(40, 9)}, ("(40, 9)", "output_norm.weight", "12")),
    ],
)
def test_inputs_that_do_not_fit_are_refused_with_both_shapes(make_case, change, words):
    case = make_case("v1")
    values = {
        "h_ver": case.h_ver,
        "h_draft": case.h_draft,
        "ids": case.ids,
        "logits": case.logits,
        "path": torch.zeros(3, 1, dtype=torch.int32),
        "embed": case.embed,
        "lm_head": case.lm_head,
    } | change
    with pytest.raises(AdapterError) as caught:
        case.adapter.score_children(*values.values())
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
