"""What is no kernel, as native code: so that a captured program calls it without Python."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch


class NativeCall(ABC):
    """The program that calls it keeps it, and what it refers to.

    function: address of a `std::int32_t function(void* context)` that throws nothing. 0 says that
    it did what it is for; otherwise `finish` is called. context: what it is given.
    """

    function: int
    context: int

    @abstractmethod
    def finish(self) -> None:
        """Does what `function` has left to do; the program then goes on. Raises why it cannot."""

    @abstractmethod
    def abandon(self) -> None:
        """The program ended early: nothing the call was made for is touched from now on.

        The program lends tensors to its calls, and nobody may keep them when it is interrupted.
        """


NativeForm = Callable[..., NativeCall | None]
"""Gives the same call as native code for tensors; None if it must be called from Python."""


def no_native_form(*_tensors: torch.Tensor) -> None:
    """Of a call that has none."""
