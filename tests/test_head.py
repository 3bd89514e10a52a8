import pytest
import torch
from tiny_policies import ARCHITECTURE_NAMES, add_random_adapter, random_policy
from trl.kernels import ChunkedLogProbFunction

from llm_policy.grpo import head
from llm_policy.grpo.head import TokenLogProbabilities, finds_gradient_on_the_way

TOKENS, HIDDEN, VOCABULARY = 23, 16, 400


def case(dtype: torch.dtype, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, weights, labels, and the gradient that the loss sends back; a large scale makes tokens sure."""
    generator = torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(TOKENS, HIDDEN, generator=generator) * scale
    weight_VH = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    labels_N = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    if scale > 1:
        labels_N = (hidden_NH @ weight_VH.T).argmax(1)
    return hidden_NH.to(dtype).requires_grad_(), weight_VH.to(dtype), labels_N, torch.randn(TOKENS, generator=generator)


def exact(hidden_NH, weight_VH, labels_N, loss_gradient_N, temperature):
    """Log-probabilities, entropies and gradient in float64, from the definition."""
    hidden_NH = hidden_NH.detach().double().requires_grad_()
    log_p_NV = ((hidden_NH @ weight_VH.double().T) / temperature).log_softmax(1)
    log_p_N = log_p_NV.gather(1, labels_N[:, None])[:, 0]
    (log_p_N * loss_gradient_N).sum().backward()
    return log_p_N.detach(), -(log_p_NV.exp() * log_p_NV).sum(1).detach(), hidden_NH.grad


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("elements", [2**23, 5 * VOCABULARY, 1])
def test_log_probabilities_entropies_and_gradient_by_definition(monkeypatch, elements, temperature):
    monkeypatch.setattr(head, "ELEMENTS_PER_CHUNK", elements)
    hidden_NH, weight_VH, labels_N, loss_gradient_N = case(torch.float32)
    expected = exact(hidden_NH, weight_VH, labels_N, loss_gradient_N, temperature)
    log_p_N, entropy_N = TokenLogProbabilities.apply(hidden_NH, weight_VH, labels_N, temperature)
    assert not entropy_N.requires_grad
    (log_p_N * loss_gradient_N).sum().backward()
    for found, value in zip((log_p_N, entropy_N, hidden_NH.grad), expected, strict=True):
        torch.testing.assert_close(found.double(), value, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_in_16_bits_no_further_from_exact_than_the_head_of_trl(scale):
    """At scale 4 most tokens are all but sure: what is left of 1 - p must outlast the rounding."""
    hidden_NH, weight_VH, labels_N, loss_gradient_N = case(torch.bfloat16, scale)
    log_p_exact_N, _, gradient_exact_NH = exact(hidden_NH, weight_VH, labels_N, loss_gradient_N, 1.0)
    if scale > 1:
        assert (log_p_exact_N > -0.01).double().mean() > 0.5

    def errors(log_p_N: torch.Tensor) -> torch.Tensor:
        """Relative to what is exact: of the log-probabilities, of the gradient."""
        hidden_NH.grad = None
        (log_p_N * loss_gradient_N).sum().backward()
        pairs = ((log_p_N, log_p_exact_N), (hidden_NH.grad, gradient_exact_NH))
        return torch.stack([(found.double() - value).norm() / value.norm() for found, value in pairs])

    own = errors(TokenLogProbabilities.apply(hidden_NH, weight_VH, labels_N, 1.0)[0])
    trl = errors(ChunkedLogProbFunction.apply(hidden_NH, weight_VH, None, labels_N, 1.0, 128)[0])
    assert (own < 1.5 * trl + 1e-3).all(), (own, trl)
    assert (own < 0.2).all()


def test_without_gradient_none_is_computed():
    hidden_NH, weight_VH, labels_N, _ = case(torch.float32)
    with torch.no_grad():
        log_p_N, _ = TokenLogProbabilities.apply(hidden_NH, weight_VH, labels_N, 1.0)
    assert not log_p_N.requires_grad


@pytest.mark.parametrize("architecture", ARCHITECTURE_NAMES)
def test_it_takes_plain_frozen_heads(architecture):
    model = add_random_adapter(random_policy(architecture)).get_base_model()
    assert finds_gradient_on_the_way(model)
    model.config.get_text_config().final_logit_softcapping = 30.0
    assert not finds_gradient_on_the_way(model)
    assert not finds_gradient_on_the_way(random_policy(architecture))  # its head is trained


def test_a_head_with_a_bias_is_left_to_trl():
    model = add_random_adapter(random_policy("llama")).get_base_model()
    head = model.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.zeros(head.out_features), requires_grad=False)
    assert not finds_gradient_on_the_way(model)
