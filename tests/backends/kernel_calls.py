"""Calls a backend's kernels with host tensors, placed on the chip in every way a caller may."""

import torch

from backends.device import Device
from backends.interface import BackendRuntime, Requirement
from kernels.spec import SOFT_CAP, WINDOW

MATRICES = {"linear": 1, "logits": 1, "embedding": 1}
"""Which argument of an operation is a weight."""
PLACEMENTS = ("columns", "rows", "transposed", "offset")
"""Views whose elements are not one piece of memory, or that start at an odd address."""
# Twice the rounding of one operand, over sums of some hundred terms.
TOLERANCES = {
    torch.float32: (2e-5, 2e-5),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (2e-2, 2e-2),
}


def check_close(actual, expected, dtype):
    assert actual.dtype == expected.dtype
    relative, absolute = TOLERANCES[dtype]
    torch.testing.assert_close(actual, expected, rtol=relative, atol=absolute)


class KernelCalls:
    """The backend's choice for each operation; arguments and results are on the host."""

    def __init__(self, runtime: BackendRuntime, device: Device) -> None:
        self._runtime = runtime
        self._device = device

    def __call__(self, operation, *arguments, dtype=torch.float32, layout="", placement=None):
        """placement: how the first tensor that is computed in `dtype` lies on the chip."""
        tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
        computed = [each for each in tensors if each.dtype == dtype]
        requirement = Requirement(
            dtype=str(dtype).removeprefix("torch."),
            layout=layout,
            rows=max((each.shape[0] for each in tensors if each.ndim), default=1),
            last_dimension=computed[0].shape[-1] if computed else 1,
            features=features_of(operation, arguments),
        )
        function = self._runtime.bind_kernels({operation: requirement}).function(operation)
        on_chip = []
        for place, argument in enumerate(arguments):
            if not isinstance(argument, torch.Tensor):
                on_chip.append(argument)
            elif place == MATRICES.get(operation):
                on_chip.append(self._device.to_matrix(argument))
            elif placement is not None and argument is computed[0]:
                on_chip.append(placed(self._device, argument, placement))
            else:
                on_chip.append(self._device.to_chip(argument))
        return self._to_host(function(*on_chip))

    def _to_host(self, result):
        if isinstance(result, tuple):
            return tuple(self._to_host(part) for part in result)
        return result if result is None else self._device.to_host(result)


def features_of(operation, arguments) -> tuple[str, ...]:
    """What a call asks for beyond the plain operation."""
    if operation != "attention":
        return ()
    window, soft_cap = arguments[-2:]
    return ((WINDOW,) if window else ()) + ((SOFT_CAP,) if soft_cap else ())


def placed(device: Device, tensor: torch.Tensor, placement: str) -> torch.Tensor:
    """A chip tensor equal to a host tensor [rows, ..., columns]; what lies around it is NaN."""
    if placement == "columns":
        # The parts of a fused product: rows are wider than the view.
        shape = (tensor.shape[0], tensor.shape[1] + 5, *tensor.shape[2:])
        wide = _filled(shape, tensor.dtype)
        wide[:, 3 : 3 + tensor.shape[1]] = tensor
        return device.to_chip(wide)[:, 3 : 3 + tensor.shape[1]]
    if placement == "rows":
        wide = _filled((2 * tensor.shape[0], *tensor.shape[1:]), tensor.dtype)
        wide[::2] = tensor
        return device.to_chip(wide)[::2]
    if placement == "transposed":
        return device.to_chip(tensor.transpose(0, 1).contiguous()).transpose(0, 1)
    assert placement == "offset", placement
    flat = _filled((tensor.numel() + 1,), tensor.dtype)
    flat[1:] = tensor.flatten()
    return device.to_chip(flat)[1:].view(tensor.shape)


def _filled(shape, dtype):
    return torch.full(shape, float("nan") if dtype.is_floating_point else -1, dtype=dtype)
