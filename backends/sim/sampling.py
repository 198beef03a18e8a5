"""The operations behind a step's tokens, over the vendor's kernels."""

import torch

from backends.sim.open_devices import OpenDevices


class SimSampling:
    """Each method is the operation of its name in `kernels.spec`."""

    def __init__(self, devices: OpenDevices) -> None:
        self._devices = devices

    def adjust_logits(
        self,
        logits: torch.Tensor,
        row: torch.Tensor,
        token: torch.Tensor,
        bias: torch.Tensor,
        output_count: torch.Tensor,
        presence: torch.Tensor,
        frequency: torch.Tensor,
        repetition: torch.Tensor,
    ) -> torch.Tensor:
        """The vendor's kernel works in place: it gets a copy, which is the result."""
        device = self._devices.holding(logits)
        adjusted = device.allocate(logits.shape, logits.dtype)
        device.copy(logits, adjusted)
        device.driver.adjust_logits(
            adjusted,
            device.indices(row),
            device.indices(token),
            *map(device.contiguous, (bias, output_count, presence, frequency, repetition)),
        )
        return adjusted

    def sample(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        seed: torch.Tensor,
        choice: torch.Tensor,
        index: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A token a row, and whether the row has a softmax."""
        device = self._devices.holding(logits)
        rows = logits.shape[0]
        ids, finite = device.allocate((rows,), torch.int64), device.allocate((rows,), torch.bool)
        device.driver.top_k_top_p_sampling(
            device.contiguous(logits),
            device.contiguous(temperature),
            (device.contiguous(seed), device.contiguous(choice), device.contiguous(index)),
            device.indices(top_k),
            device.contiguous(top_p),
            device.contiguous(min_p),
            ids,
            finite,
        )
        return ids, finite

    def token_logprobs(
        self, logits: torch.Tensor, ids: torch.Tensor, tops_count: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probabilities of the tokens drawn and of the likeliest, with their ids."""
        device = self._devices.holding(logits)
        rows = logits.shape[0]
        chosen = device.allocate((rows,), torch.float32)
        tops = device.allocate((rows, tops_count), torch.float32)
        top_ids = device.allocate((rows, tops_count), torch.int64)
        device.driver.token_logprobs(
            device.contiguous(logits), device.indices(ids), chosen, tops, top_ids
        )
        return chosen, tops, top_ids
