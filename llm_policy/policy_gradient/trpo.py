"""sb3-contrib's TRPO with two backward passes where that takes two for every parameter."""

import torch
from sb3_contrib import TRPO
from torch import nn


class FewPassesTRPO(TRPO):
    """The same numbers, for actors of many parameters.

    The library asks for the gradient of one parameter at a time. With an adapter in 30 layers of a language model that
    is 840 passes through the whole model in each update.
    """

    def _compute_actor_grad(
        self, kl_div: torch.Tensor, policy_objective: torch.Tensor
    ) -> tuple[list[nn.Parameter], torch.Tensor, torch.Tensor, list[tuple[int, ...]]]:
        """Actor parameters, gradients of objective and KL as vectors, and the shape of each parameter."""
        candidates = [parameter for name, parameter in self.policy.named_parameters() if "value" not in name]
        of_kl = torch.autograd.grad(kl_div, candidates, create_graph=True, allow_unused=True)
        actor = [(parameter, grad) for parameter, grad in zip(candidates, of_kl, strict=True) if grad is not None]
        parameters = [parameter for parameter, _ in actor]
        of_objective = torch.autograd.grad(policy_objective, parameters, retain_graph=True)
        return (
            parameters,
            torch.cat([grad.reshape(-1) for grad in of_objective]),
            torch.cat([grad.reshape(-1) for _, grad in actor]),
            [tuple(parameter.shape) for parameter in parameters],
        )
