"""Settings that cannot be are refused by name before anything starts."""

import pytest

from control_plane.config import (
    RUNNING_MAX,
    UINT32_MAX,
    ControlPlaneConfig,
    SchedulingConfig,
)
from control_plane.dispatch.wire import encode_form_group
from control_plane.errors import ConfigurationError
from control_plane.scheduling.messages import FormGroup, WorkerInfo
from control_plane.service import group_settings
from protos.worker_pb2 import AttachResponse

NAN = float("nan")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"block_tokens": 0}, "block_tokens is 0; .* from 1 to 4294967295"),
        ({"block_tokens": 10**20}, "block_tokens is 1000.*; .* to 4294967295"),
        ({"chunk_tokens": 5_000_000_000}, "chunk_tokens is 5000000000; .* to 4294967295"),
        ({"running_max": 65537}, "running_max is 65537; .* from 1 to 65536"),
        ({"context_tokens": 1 << 32}, "context_tokens is 4294967296"),
        ({"step_deadline_s": 1e10}, "step_deadline_s is 10000000000.0; .* to 1000000000"),
        ({"digest_interval_steps": 0}, "digest_interval_steps"),
        ({"own_faults_max": 0}, "own_faults_max"),
        ({"group_sizes": ()}, "groups"),
        ({"group_sizes": (2, 0)}, "groups"),
        ({"policy": "luck"}, "choose one of lpm, fcfs, shortest-prefill-first, priority"),
        ({"oldest_prefill_share": 1.5}, "from 0 to 1"),
        ({"oldest_prefill_share": NAN}, "from 0 to 1"),
        ({"decode_latency_target_ms": -1.0}, "decode_latency_target_ms is -1.0; .* from 0 to"),
        ({"decode_latency_target_ms": float("inf")}, "decode_latency_target_ms is inf"),
        ({"prefill_time_share_min": 1.0}, "prefill_time_share_min is 1.0; .* from 0 to 0.9"),
        ({"context_tokens": 1}, "context_tokens is 1; .* from 2 to"),
        ({"retractions_before_reservation": -1}, "retractions_before_reservation"),
        ({"heartbeat_interval_s": 0.0}, "heartbeat_interval_s is 0"),
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
        ({"http_port": 70_000}, "http_port is 70000; .* from 0 to 65535"),
        ({"grpc_port": -1}, "grpc_port"),
        ({"frontends": 17}, "frontends is 17; .* from 0 to 16"),
        ({"tokenizer_threads": 0}, "tokenizer_threads"),
        ({"http_body_bytes_max": 0}, "http_body_bytes_max"),
        ({"client_message_bytes_max": 1 << 31}, "client_message_bytes_max"),
        ({"intake_bytes_max": 0}, "intake_bytes_max is 0; .* at least 1"),
        ({"json_values_max": 0}, "json_values_max"),
        ({"body_deadline_s": 0.0}, "body_deadline_s is 0"),
        ({"choices_max": 0}, "choices_max"),
        ({"prompt_scores_max": -1}, "prompt_scores_max is -1; .* from 0 to"),
        ({"top_logprobs_max": -1}, "top_logprobs_max is -1; .* from 0 to"),
        ({"stop_strings_max": -1}, "stop_strings_max"),
        ({"stop_string_characters_max": 0}, "stop_string_characters_max"),
        ({"stop_token_ids_max": -1}, "stop_token_ids_max"),
        ({"logit_bias_max": -1}, "logit_bias_max"),
        ({"drain_deadline_s": NAN}, "drain_deadline_s is nan"),
        ({"kv_policy": "luck"}, "choose one of cover, replicate, shard"),
        ({"stream_buffer_stall_s": float("inf")}, "stream_buffer_stall_s is inf"),
    ],
)
def test_service_settings_that_cannot_be(settings, said) -> None:
    with pytest.raises(ConfigurationError, match=said):
        ControlPlaneConfig(model_path="m", **settings)


def test_a_block_holds_no_more_than_the_models_context() -> None:
    config = ControlPlaneConfig("m", scheduling=SchedulingConfig(block_tokens=64))
    config.check_model_context(64)
    with pytest.raises(ConfigurationError, match=r"block_tokens is 64.* 63 .*--block-tokens"):
        config.check_model_context(63)


@pytest.mark.parametrize(
    ("name", "value"), [("chunk_tokens", UINT32_MAX), ("running_max", RUNNING_MAX)]
)
def test_the_largest_settings_fit_the_messages_to_workers(name, value) -> None:
    config = ControlPlaneConfig("m", scheduling=SchedulingConfig(**{name: value}))
    worker = WorkerInfo(
        "chip0", 1, 1, "cpu", "", "float32", "digest", 1 << 20, 256, kv_windows=(9,)
    )
    form = FormGroup("chip0", 1, "g0", epoch=1, rank=0, world_size=1, deadline_s=1.0)
    sent = AttachResponse.FromString(
        encode_form_group(form, group_settings(config, 256), worker, term=1)
    )
    assert {"chunk_tokens": sent.form.chunk_tokens, "running_max": sent.form.slots}[name] == value


@pytest.mark.parametrize(("choices_max", "queue_requests_max"), [(8, 9), (9, 8)])
def test_all_choices_of_a_request_fit_the_queue(choices_max, queue_requests_max) -> None:
    scheduling = SchedulingConfig(queue_requests_max=queue_requests_max)
    config = ControlPlaneConfig("m", choices_max=choices_max, scheduling=scheduling)
    assert config.call_choices_max == 8


def test_limits_that_may_forbid_something_may_be_0() -> None:
    names = ("top_logprobs_max", "stop_strings_max", "stop_token_ids_max", "logit_bias_max")
    ControlPlaneConfig(model_path="m", drain_deadline_s=0.0, **dict.fromkeys(names, 0))


def test_secrets_are_not_part_of_what_is_printed() -> None:
    config = ControlPlaneConfig(model_path="m", join_token="sesame", api_keys=("sk-1",))
    assert "sesame" not in repr(config)
    assert "sk-1" not in repr(config)
