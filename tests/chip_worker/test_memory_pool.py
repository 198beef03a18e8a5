"""The default size of a KV pool, and settings out of range."""

import pytest

from backends.errors import OutOfMemory
from chip_worker.config import WorkerConfig
from chip_worker.errors import ConfigurationError
from chip_worker.kv_capacity import default_capacity


def config(**changes):
    return WorkerConfig(
        **({"worker_id": "chip0", "control_plane": "", "model_path": "model"} | changes)
    )


def test_plenty_of_memory_gives_what_is_wanted():
    assert default_capacity(config(), 100, block_bytes=1000, free_bytes=10**9) == 100


def test_scarce_memory_gives_this_chips_share_less_the_reserve():
    two_chips = config(chips_on_host=2)
    # 25 % of 1,000,000 over two chips is 125,000; 80 % of that holds 100 blocks.
    assert default_capacity(two_chips, 5000, block_bytes=1000, free_bytes=1_000_000) == 100


def test_a_chip_with_memory_of_its_own_shares_it_with_no_other():
    two_chips = config(chips_on_host=2)
    capacity = default_capacity(
        two_chips, 5000, block_bytes=1000, free_bytes=1_000_000, shared=False
    )
    assert capacity == 200


def test_memory_for_less_than_a_block_is_refused_with_a_remedy():
    with pytest.raises(OutOfMemory, match=r"kv_memory_fraction 0\.25 .* --kv-blocks"):
        default_capacity(config(), 10, block_bytes=1 << 20, free_bytes=1 << 20)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("worker_id", ""),
        ("chip_indices", ()),
        ("chips_on_host", 0),
        ("kv_blocks", 0),
        ("kv_memory_fraction", 0.0),
        ("kv_memory_reserve", 1.0),
        ("message_bytes_max", 0),
        ("step_credit", 0),
    ],
)
def test_a_setting_out_of_range_is_named(field, value):
    with pytest.raises(ConfigurationError, match=field):
        config(**{field: value})
