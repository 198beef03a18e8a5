"""Simulated chips with little memory and round numbers for times."""

from dataclasses import replace

import pytest
import torch

from backends.simulator.chip import SimulatedChip
from backends.simulator.clock import VirtualClock
from backends.simulator.faults import ChipFaults, parse_faults
from backends.simulator.profile import IDEAL, assumed

torch.set_num_threads(1)


def make_profile(profile=IDEAL, **constants):
    """A profile with constants replaced: 1 MiB, 10 us a launch, 40 us a collective, 1 us a byte."""
    values = {
        "memory_bytes": 1 << 20,
        "launch_s": 10e-6,
        "query_s": 1e-6,
        "host_link_bytes_per_s": 1e6,
        "link_bytes_per_s": 1e6,
        "collective_fixed_s": 40e-6,
        **constants,
    }
    labelled = {name: assumed(value, "a test's") for name, value in values.items()}
    return replace(profile, **labelled)


@pytest.fixture
def new_profile():
    return make_profile


@pytest.fixture
def new_chip():
    """Makes chips: new_chip(execution="latest", faults="", **constants of the profile)."""

    def make(
        *, index=0, profile=IDEAL, execution="latest", seed=0, faults="", die=None, **constants
    ):
        return SimulatedChip(
            make_profile(profile, **constants),
            index,
            VirtualClock(),
            seed,
            execution,
            faults=ChipFaults(parse_faults(faults), index),
            die=die,
        )

    return make
