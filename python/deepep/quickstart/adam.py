"""Adam, because torch.optim imports torch's compiler: seconds for each process that starts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn import Parameter


class Adam:
    """Changes parameters by their gradients."""

    def __init__(self, parameters: Iterable[Parameter], rate: float) -> None:
        self._state = [(p, torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]
        self._rate = rate
        self._steps = 0

    @torch.no_grad()
    def step(self, decay: float = 0.9, square_decay: float = 0.99, epsilon: float = 1e-8) -> None:
        """Applies the gradients and forgets them."""
        self._steps += 1
        correction = (1 - square_decay**self._steps) ** 0.5
        rate = self._rate * correction / (1 - decay**self._steps)
        for parameter, mean, square in self._state:
            gradient = parameter.grad
            assert gradient is not None
            mean.lerp_(gradient, 1 - decay)
            square.mul_(square_decay).addcmul_(gradient, gradient, value=1 - square_decay)
            # Nobody reads the gradient again, so its memory serves for the divisor.
            torch.sqrt(square, out=gradient).add_(epsilon * correction)
            parameter.addcdiv_(mean, gradient, value=-rate)
        self.forget_gradients()

    def forget_gradients(self) -> None:
        for parameter, _, _ in self._state:
            parameter.grad = None
