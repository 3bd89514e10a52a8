"""Log-probability and entropy of given tokens at a model's head, with the gradient found on the way.

The gradient of a token's log-probability with respect to its hidden state is known up to one factor per token, which
is all that the loss adds later. So it is computed while the softmax is at hand: two products with the vocabulary
instead of three, and half as many passes over its columns as TRL's chunked head makes without Triton. On a CPU that
head took a third of a training pass.

Axes: N tokens, H hidden, V vocabulary.
"""

import torch
from transformers import PreTrainedModel

ELEMENTS_PER_CHUNK = 2**23  # of the (tokens, V) matrix that exists at a time: 32 MB in float32
# Models that do something between the head and the softmax
SCALINGS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "output_multiplier", "lm_head_multiplier")


def finds_gradient_on_the_way(model: PreTrainedModel) -> bool:
    """Whether `TokenLogProbabilities` can stand in for TRL's head: a plain, frozen one on a CPU."""
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    plain = type(head) is torch.nn.Linear and head.bias is None and not head.weight.requires_grad
    is_scaled = any(getattr(config, name, None) for name in SCALINGS)
    return plain and not is_scaled and head.weight.device.type == "cpu"


class TokenLogProbabilities(torch.autograd.Function):
    """(N,) log-probabilities of the labels and (N,) entropies in nats, float32; the entropies have no gradient."""

    @staticmethod
    def forward(
        ctx,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        labels_N: torch.Tensor,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        log_probabilities, entropies, gradients = [], [], []
        count = max(1, ELEMENTS_PER_CHUNK // len(weight_VH))
        for hidden, labels in zip(hidden_NH.split(count), labels_N[:, None].split(count), strict=True):
            logits = (hidden @ weight_VH.T).float()
            if temperature != 1.0:
                logits /= temperature
            normaliser = logits.logsumexp(1, keepdim=True)
            log_probabilities.append((logits.gather(1, labels) - normaliser)[:, 0])
            logits -= normaliser
            shares = logits.exp()
            entropies.append(-torch.linalg.vecdot(shares, logits))
            if ctx.needs_input_grad[0]:
                # Less 1 at the label before the rounding to 16 bits: of a token that is all but sure, little is left
                shares.scatter_add_(1, labels, shares.new_full(labels.shape, -1.0))
                gradients.append(-(shares.to(weight_VH.dtype) @ weight_VH).float() / temperature)
        ctx.hidden_type = hidden_NH.dtype
        if gradients:
            ctx.save_for_backward(torch.cat(gradients))
        entropies_N = torch.cat(entropies)
        ctx.mark_non_differentiable(entropies_N)
        return torch.cat(log_probabilities), entropies_N

    @staticmethod
    def backward(ctx, loss_gradient_N: torch.Tensor, _):
        (gradient_NH,) = ctx.saved_tensors
        return (gradient_NH * loss_gradient_N[:, None]).to(ctx.hidden_type), None, None, None
