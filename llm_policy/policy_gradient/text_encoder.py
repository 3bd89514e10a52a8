"""A language model as a reader: text -> vector. A model that is not trained reads each text once.

Axes: N texts, T tokens, E components of a vector.
"""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import layer_norm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from llm_policy.errors import InputError
from llm_policy.models import context_tokens

POOLINGS = ("last", "mean")
KEPT_BYTES = 256 * 2**20  # of vectors in memory
TEXTS_PER_PASS = 64
PADDED_TO = 8  # tokens: fewer different shapes


class TextEncoder:
    """The last hidden state of a language model, pooled over the text, with a layer norm, in float32.

    No `nn.Module`, so that a policy that holds it neither initialises, saves nor trains the model's own weights.
    Dropout is off, always.

    Attributes:
        parameters: those that are trained; a LoRA adapter's, or none.
        is_training: the weights are about to change. Then no vector is kept.
        asked, known: texts so far, and those whose vector was known already.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pooling: str) -> None:
        self.decoder: nn.Module = model.eval().get_decoder()
        self.tokenizer, self.pooling = tokenizer, pooling
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.size: int = model.config.get_text_config().hidden_size
        self.positions = context_tokens(model)
        self.device, self.dtype = model.device, str(model.dtype).removeprefix("torch.")
        self.is_training = False
        self.common_E, self.spread = torch.zeros(self.size, device=self.device), 1.0
        self.asked = self.known = 0
        self._kept: OrderedDict[str, torch.Tensor] = OrderedDict()

    @property
    def hit_rate(self) -> float:
        """Share of the texts whose vector was known."""
        return self.known / max(1, self.asked)

    @torch.no_grad()
    def center(self, texts: Sequence[str]) -> None:
        """From now on subtract what the vectors of these texts share, and bring the rest to a mean square of 1.

        A pretrained model says nearly the same of every state of a lake: cosine 0.99. A head behind that takes one
        action for all.
        """
        vectors_NE = self._kept_or_encoded(list(dict.fromkeys(texts)))
        self.common_E = vectors_NE.mean(0)
        self.spread = float((vectors_NE - self.common_E).square().mean().sqrt().clamp(min=1e-6))

    def set_training(self, is_training: bool) -> None:
        self.is_training = is_training and bool(self.parameters)
        if self.is_training:
            self.forget()

    def forget(self) -> None:
        """The weights are others now, where any are trained: what was read with the old ones does not count."""
        if self.parameters:
            self._kept.clear()

    def read(self, texts: Sequence[str]) -> torch.Tensor:
        """Vectors (N, E). `InputError` for a text that is longer than the model can read."""
        different = list(dict.fromkeys(texts))
        row_of = {text: row for row, text in enumerate(different)}
        vectors = self._encode(different) if self.is_training else self._kept_or_encoded(different)
        return ((vectors - self.common_E) / self.spread)[[row_of[text] for text in texts]]

    @torch.no_grad()
    def _kept_or_encoded(self, texts: Sequence[str]) -> torch.Tensor:
        unknown = [text for text in texts if text not in self._kept]
        self.asked += len(texts)
        self.known += len(texts) - len(unknown)
        found = {text: self._kept[text] for text in texts if text in self._kept}
        for first in range(0, len(unknown), TEXTS_PER_PASS):
            part = unknown[first : first + TEXTS_PER_PASS]
            vectors = self._encode(part)
            found.update((text, vector.clone()) for text, vector in zip(part, vectors, strict=True))  # each on its own
        for text, vector in found.items():
            self._kept[text] = vector
            self._kept.move_to_end(text)
        while len(self._kept) > KEPT_BYTES // (4 * self.size):
            self._kept.popitem(last=False)
        return torch.stack([found[text] for text in texts])

    def _encode(self, texts: Sequence[str]) -> torch.Tensor:
        # Padded on the right: with causal attention no token of a text ever sees it
        padded = self.tokenizer(
            list(texts), padding=True, padding_side="right", pad_to_multiple_of=PADDED_TO, return_tensors="pt"
        ).to(self.device)
        ids_NT, mask_NT = padded["input_ids"], padded["attention_mask"]
        lengths = mask_NT.sum(1)
        longest = int(lengths.max())
        if longest > self.positions:
            raise InputError(
                f"a state is {longest} tokens of text, and the model reads {self.positions}: "
                f"{texts[int(lengths.argmax())]!r:.80}; take another model or a smaller state"
            )
        hidden_NTE = self.decoder(input_ids=ids_NT, attention_mask=mask_NT, use_cache=False).last_hidden_state
        if self.pooling == "last":
            pooled_NE = hidden_NTE[torch.arange(len(texts)), lengths - 1].float()
        else:
            pooled_NE = (hidden_NTE.float() * mask_NT[:, :, None]).sum(1) / mask_NT.sum(1, keepdim=True)
        return layer_norm(pooled_NE, (self.size,))
