"""The policy that both algorithms train: actor and critic apart, and the actor may read text.

Axes: N states, D components of the vector that describes one.
"""

from functools import partial
from itertools import pairwise

import torch
from stable_baselines3.common.policies import ActorCriticPolicy
from torch import nn

from llm_policy.policy_gradient.state_text import StateText
from llm_policy.policy_gradient.text_encoder import TextEncoder


class StateReader:
    """Vector -> text -> vector of a language model."""

    def __init__(self, text_of: StateText, encoder: TextEncoder) -> None:
        self.text_of, self.encoder = text_of, encoder

    def __call__(self, vectors_ND: torch.Tensor) -> torch.Tensor:
        return self.encoder.read([self.text_of(vector) for vector in vectors_ND.cpu().numpy()])


class Networks(nn.Module):
    """The hidden layers of actor and critic. The critic reads the vector itself, whatever the actor reads.

    The names are those that stable-baselines3 looks for; TRPO takes what has "value" in its name for the critic's.
    """

    def __init__(self, inputs: int, sizes: list[int], activation: type[nn.Module], reader: StateReader | None) -> None:
        super().__init__()
        self.reader = reader
        self.latent_dim_pi = self.latent_dim_vf = sizes[-1]
        self.policy_net = _layers(inputs if reader is None else reader.encoder.size, sizes, activation)
        self.value_net = _layers(inputs, sizes, activation)
        # Of the language model's parameters only these: TRPO fails on one that has no gradient
        self.adapter = nn.ParameterList([] if reader is None else reader.encoder.parameters)

    def forward(self, vectors_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.forward_actor(vectors_ND), self.forward_critic(vectors_ND)

    def forward_actor(self, vectors_ND: torch.Tensor) -> torch.Tensor:
        return self.policy_net(vectors_ND if self.reader is None else self.reader(vectors_ND))

    def forward_critic(self, vectors_ND: torch.Tensor) -> torch.Tensor:
        return self.value_net(vectors_ND)


def _layers(inputs: int, sizes: list[int], activation: type[nn.Module]) -> nn.Sequential:
    return nn.Sequential(
        *(module for pair in pairwise([inputs, *sizes]) for module in (nn.Linear(*pair), activation()))
    )


class Policy(ActorCriticPolicy):
    """stable-baselines3's actor-critic with `Networks` in the middle.

    Args:
        reader: what the actor reads; None: the vector.
    """

    def __init__(self, *arguments, reader: StateReader | None = None, **options) -> None:
        self.reader = reader
        super().__init__(*arguments, **options)

    def _build_mlp_extractor(self) -> None:
        assert isinstance(self.net_arch, list)
        self.mlp_extractor = Networks(self.features_dim, self.net_arch, self.activation_fn, self.reader)

    def _build(self, lr_schedule) -> None:
        """Orthogonal weights, with stable-baselines3's gains, for the heads alone.

        Its own code would do the same to every linear layer of a language model, adapter included, without a word.
        """
        is_orthogonal, self.ortho_init = self.ortho_init, False
        super()._build(lr_schedule)
        networks = self.mlp_extractor
        gains = {networks.policy_net: 2**0.5, networks.value_net: 2**0.5, self.action_net: 0.01, self.value_net: 1.0}
        for module, gain in gains.items() if is_orthogonal else ():
            module.apply(partial(self.init_weights, gain=gain))

    def load_state_dict(self, *arguments, **options):
        result = super().load_state_dict(*arguments, **options)
        if self.reader is not None:
            self.reader.encoder.forget()
        return result

    def set_training_mode(self, mode: bool) -> None:
        super().set_training_mode(mode)
        if self.reader is not None:
            self.reader.encoder.set_training(mode)
