"""A language model as a reader of states: what its vectors depend on, and what is kept of them."""

import pytest
import torch
from tiny_models import build_tiny_model
from torch.testing import assert_close

from llm_policy.errors import InputError
from llm_policy.models import load_model, load_tokenizer
from llm_policy.policy_gradient import text_encoder
from llm_policy.policy_gradient.state_text import vector_text
from llm_policy.policy_gradient.text_encoder import POOLINGS, TextEncoder

TEXTS = [vector_text(("pole angle", "speed"), [n / 10, -n]) for n in range(8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("model") / "llama", "llama")


def encoder_of(folder, pooling="last", trained=False):
    model = load_model(folder, dtype="float32").requires_grad_(trained)
    return TextEncoder(model, load_tokenizer(folder), pooling)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_eight_states_have_eight_vectors(folder, pooling):
    encoder = encoder_of(folder, pooling)
    vectors = encoder.read(TEXTS)
    assert vectors.shape == (8, encoder.size)
    distances = torch.cdist(vectors, vectors) + 10 * torch.eye(8)
    assert distances.min() > 1e-3


@pytest.mark.parametrize("pooling", POOLINGS)
def test_padding_changes_no_vector(folder, pooling):
    alone = encoder_of(folder, pooling).read(TEXTS[:1])
    beside_longer = encoder_of(folder, pooling).read([TEXTS[0], TEXTS[1] * 5])[:1]
    assert_close(alone, beside_longer, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_the_last_token_and_the_mean_are_those_of_the_model(folder, pooling):
    encoder = encoder_of(folder, pooling)
    ids = torch.tensor([encoder.tokenizer(TEXTS[3])["input_ids"]])
    with torch.no_grad():
        hidden = encoder.decoder(input_ids=ids).last_hidden_state[0]
    expected = hidden[-1] if pooling == "last" else hidden.mean(0)
    expected = (expected - expected.mean()) / (expected.var(correction=0) + 1e-5).sqrt()
    assert_close(encoder.read(TEXTS[3:4])[0], expected, atol=1e-4, rtol=1e-4)


def test_each_text_is_read_once(folder):
    encoder = encoder_of(folder)
    first = encoder.read([*TEXTS, TEXTS[0]])
    assert (encoder.asked, encoder.known) == (8, 0)
    assert torch.equal(first[0], first[-1])
    assert torch.equal(encoder.read(TEXTS[::-1]), first[:8].flip(0))
    assert (encoder.asked, encoder.known, encoder.hit_rate) == (16, 8, 0.5)


def test_an_update_forgets_nothing_of_a_frozen_model(folder):
    encoder = encoder_of(folder)
    encoder.set_training(True)
    encoder.read(["a", "b"])
    encoder.read(["a", "b"])
    assert (encoder.asked, encoder.known) == (4, 2)


def test_what_is_kept_is_bounded(folder, monkeypatch):
    encoder = encoder_of(folder)
    monkeypatch.setattr(text_encoder, "KEPT_BYTES", 3 * 4 * encoder.size)
    everything = encoder.read(TEXTS)
    assert len(encoder._kept) == 3
    assert sum(vector.untyped_storage().nbytes() for vector in encoder._kept.values()) == text_encoder.KEPT_BYTES
    assert_close(encoder.read(TEXTS), everything)


def test_a_trained_model_keeps_nothing_of_before_a_step(folder):
    encoder = encoder_of(folder, trained=True)
    before = encoder.read(TEXTS)
    assert not before.requires_grad
    encoder.set_training(True)
    assert encoder.read(TEXTS).requires_grad
    with torch.no_grad():
        for parameter in encoder.parameters:
            parameter.mul_(1.1)
    encoder.set_training(False)
    assert not torch.allclose(encoder.read(TEXTS), before, atol=1e-3)


def test_dropout_is_off(folder):
    """Also while the algorithm trains; switched on by hand, the same model says something else each time."""
    model = load_model(folder, dtype="float32").train()
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    encoder = TextEncoder(model, load_tokenizer(folder), "last")
    encoder.set_training(True)
    assert torch.equal(encoder._encode(TEXTS), encoder._encode(TEXTS))
    encoder.decoder.train()
    assert not torch.equal(encoder._encode(TEXTS), encoder._encode(TEXTS))


def test_centred_vectors_differ_more(folder):
    """Their mean is 0 and their mean square 1; what is kept is not touched."""
    encoder = encoder_of(folder)
    before = encoder.read(TEXTS)
    encoder.center(TEXTS)
    after = encoder.read(TEXTS)
    assert_close(after.mean(0), torch.zeros(encoder.size), atol=1e-5, rtol=0)
    assert_close(after.square().mean(), torch.tensor(1.0))
    similar, apart = (torch.corrcoef(vectors)[0, 1:].mean() for vectors in (before, after))
    assert apart < similar - 0.5
    assert_close(after * encoder.spread + encoder.common_E, before, atol=1e-5, rtol=1e-4)


def test_a_text_that_the_model_cannot_read(folder):
    with pytest.raises(InputError, match=r"tokens of text, and the model reads 512"):
        encoder_of(folder).read(["0.12 " * 600])
