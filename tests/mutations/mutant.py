"""What a mutant is: one line of the sources edited, and the test that must notice."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """An edit that makes a backend wrong in a way that hardware would forgive for a while.

    name: what is wrong now. old: stands exactly once in `file`. test: node id of the test that
    must turn red, run with `backend`; options: NAME=VALUE, for the backend.
    """

    name: str
    file: str
    old: str
    new: str
    test: str
    backend: str = "cpu"
    options: tuple[str, ...] = ()
