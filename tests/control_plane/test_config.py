"""Settings that cannot be are refused by name before anything starts."""

import pytest

from control_plane.config import ControlPlaneConfig, SchedulingConfig
from control_plane.errors import ConfigurationError

NAN = float("nan")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"block_tokens": 0}, "block_tokens is 0; .* at least 1"),
        ({"digest_interval_steps": 0}, "digest_interval_steps"),
        ({"own_faults_max": 0}, "own_faults_max"),
        ({"group_sizes": ()}, "groups"),
        ({"group_sizes": (2, 0)}, "groups"),
        ({"policy": "luck"}, "lpm or fcfs"),
        ({"oldest_prefill_share": 1.5}, "from 0 to 1"),
        ({"oldest_prefill_share": NAN}, "from 0 to 1"),
        ({"context_tokens": 1}, "2 or more"),
        ({"step_deadline_s": NAN}, "step_deadline_s is nan"),
        ({"recovery_timeout_s": -1.0}, "recovery_timeout_s is -1"),
        ({"lease_s": 5.0}, "must grow in this order"),
        ({"formation_heartbeat_timeout_s": 3.0}, "give at least as much"),
    ],
)
def test_scheduling_settings_that_cannot_be(settings, said) -> None:
    with pytest.raises(ConfigurationError, match=said):
        SchedulingConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"http_port": 70_000}, "http_port is 70000; give 1 to 65535"),
        ({"grpc_port": -1}, "grpc_port"),
        ({"tokenizer_threads": 0}, "tokenizer_threads"),
        ({"http_body_bytes_max": 0}, "http_body_bytes_max"),
        ({"stream_buffer_stall_s": float("inf")}, "stream_buffer_stall_s is inf"),
    ],
)
def test_service_settings_that_cannot_be(settings, said) -> None:
    with pytest.raises(ConfigurationError, match=said):
        ControlPlaneConfig(model_path="m", **settings)
