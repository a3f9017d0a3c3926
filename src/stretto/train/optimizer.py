"""AdamW with float32 masters: weights may be bfloat16, sums of gradients and updates never are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class MasterAdamW:
    """AdamW (Loshchilov & Hutter 2019) over a model's trainable parameters.

    Each parameter has a float32 master, two float32 moments, and a float32 sum of gradients that
    `collect` adds to. A float32 parameter is its own master. `weight_decay` is for matrices alone.
    """

    def __init__(
        self,
        named: Mapping[str, Tensor],
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        self.parameters = dict(named)
        self.masters = {
            name: p.detach() if p.dtype == torch.float32 else p.detach().float()
            for name, p in self.parameters.items()
        }
        self.first = {name: torch.zeros_like(m) for name, m in self.masters.items()}
        self.second = {name: torch.zeros_like(m) for name, m in self.masters.items()}
        self.gradients = {name: torch.zeros_like(m) for name, m in self.masters.items()}
        self._betas, self._eps, self._decay = betas, eps, weight_decay

    @torch.no_grad()
    def collect(self) -> None:
        """Adds the parameters' gradients to the sums, and clears them."""
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                self.gradients[name].add_(parameter.grad)
                parameter.grad = None

    @torch.no_grad()
    def normalise(self, num_terms: float, max_norm: float | None) -> float:
        """Divides the sums by the number of terms and clips them; the norm before clipping."""
        sums = list(self.gradients.values())
        torch._foreach_div_(sums, num_terms)
        norm = math.sqrt(sum(float(n) ** 2 for n in torch._foreach_norm(sums)))
        if max_norm is not None and norm > max_norm:
            torch._foreach_mul_(sums, max_norm / norm)
        return norm

    @torch.no_grad()
    def update(self, lr: float, step: int) -> None:
        """One step (`step` counts from 0) with the sums, which are then cleared."""
        beta1, beta2 = self._betas
        correct1, correct2 = 1 - beta1 ** (step + 1), 1 - beta2 ** (step + 1)
        for name, parameter in self.parameters.items():
            master, gradient = self.masters[name], self.gradients[name]
            first, second = self.first[name], self.second[name]
            first.lerp_(gradient, 1 - beta1)
            second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            if self._decay and master.ndim > 1:
                master.mul_(1 - lr * self._decay)
            denominator = (second / correct2).sqrt_().add_(self._eps)
            master.addcdiv_(first, denominator, value=-lr / correct1)
            if parameter.dtype != torch.float32:
                parameter.copy_(master)
            gradient.zero_()

    # -- what a checkpoint keeps ---------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        parts = {"master": self.masters, "first": self.first, "second": self.second}
        return {f"{part}/{name}": t for part, ts in parts.items() for name, t in ts.items()}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Takes back what `state` gave, the parameters included. Raises `KeyError`."""
        own: Mapping[str, Any] = self.state()
        if own.keys() != state.keys():
            raise KeyError(min(own.keys() ^ state.keys()))
        for key, tensor in own.items():
            tensor.copy_(state[key])
        for name, parameter in self.parameters.items():
            if parameter.dtype != torch.float32:
                parameter.copy_(self.masters[name])
