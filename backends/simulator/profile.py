"""What a kind of simulated chip costs and which traps it has; every constant says where it is from.

A profile is data: the device model reads it, and a backend on top of the model declares its
capabilities from it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Generic, Literal, TypeVar

Value = TypeVar("Value")
Label = Literal["sourced", "assumed"]
EventQuery = Literal["works", "unsupported", "always_true"]
SynchronizeCovers = Literal["all_streams", "default_stream"]
AllocationPolicy = Literal["best_fit", "first_fit"]


@dataclass(frozen=True)
class Labelled(Generic[Value]):
    """A constant, and whether `source` is where it was published or why it was assumed."""

    value: Value
    label: Label
    source: str


@dataclass(frozen=True)
class Profile:
    """One kind of chip. Times in seconds, sizes in bytes; None where there is no limit."""

    name: str
    summary: str

    memory_bytes: Labelled[int]
    launch_s: Labelled[float]
    """Host time a launch takes."""
    query_s: Labelled[float]
    """Host time asking an event takes."""
    memory_bytes_per_s: Labelled[float]
    flops_per_s: Labelled[float]
    host_link_bytes_per_s: Labelled[float]
    collective_fixed_s: Labelled[float]
    """What a collective takes without a byte; its bytes come on top at `link_bytes_per_s`."""
    link_bytes_per_s: Labelled[float]
    queue_depth: Labelled[int]
    """Operations a stream holds before a launch waits for the oldest."""

    event_query: Labelled[EventQuery]
    event_timing: Labelled[bool]
    """False: the time between two events is always 0."""
    synchronize_covers: Labelled[SynchronizeCovers]
    async_allocate: Labelled[bool]
    """False: giving memory back waits for the work that uses it."""
    stale_reads_after_async_copy: Labelled[bool]
    """The copy engine bypasses the cache: kernels see an async copy from the host after a fence."""
    blocking_collectives: Labelled[bool]
    """A collective occupies the host until it is done, a send until it is received."""
    sticky_errors: Labelled[bool]
    """After an error every later call fails, giving memory back included."""
    deferred_out_of_memory: Labelled[bool]
    """Running out of memory shows at the next synchronization."""
    can_capture: Labelled[bool]

    decode_rows_max: Labelled[int | None]
    """Decode attention rejects more rows."""
    attention_window: Labelled[bool]
    """Attention kernels can leave out what lies behind a window."""
    attention_soft_cap: Labelled[bool]
    """Attention kernels can bound their scores."""
    gelu_gate: Labelled[bool]
    """There is a kernel for gelu times its other half."""
    wrong_result_rows_min: Labelled[int | None]
    """From so many rows on a kernel's result is silently wrong."""
    int32_indices_only: Labelled[bool]
    contiguous_only: Labelled[bool]
    alignment_bytes: Labelled[int]
    """The last dimension of a kernel's argument is a multiple of this."""
    has_float64: Labelled[bool]
    block_tokens_multiple: Labelled[int]
    allocation_alignment_bytes: Labelled[int]
    allocation_policy: Labelled[AllocationPolicy]
    workspace_per_shape: Labelled[bool]
    """Kernels keep a hidden buffer for every new shape until told to release it."""
    workspace_bytes: Labelled[int]

    def constants(self) -> Iterator[tuple[str, Labelled[object]]]:
        """Every constant with its name."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Labelled):
                yield field.name, value

    @property
    def assumed_count(self) -> int:
        """How many constants nobody has a source for."""
        return sum(constant.label == "assumed" for _, constant in self.constants())

    def seconds(self, *, moved_bytes: float = 0, flops: float = 0) -> float:
        """How long the chip works on a kernel that moves so many bytes and computes so much."""
        return moved_bytes / self.memory_bytes_per_s.value + flops / self.flops_per_s.value


def sourced(value: Value, source: str) -> Labelled[Value]:
    """A constant somebody published."""
    return Labelled(value, "sourced", source)


def assumed(value: Value, reason: str) -> Labelled[Value]:
    """A constant nobody published, and why it is set so."""
    return Labelled(value, "assumed", reason)


_CUDA = "CUDA C++ programming guide"
_H100 = "NVIDIA H100 SXM datasheet"
_SHIM = "PyTorch over the vendor's CUDA shim"
_XRE = "InfiniCore infinirt_kunlun.cc, over the vendor's native runtime"
_TRAP = "a trap another profile has, or a harsher one"

IDEAL = Profile(
    name="ideal",
    summary="as forgiving as CUDA: every call works as the textbook says",
    memory_bytes=sourced(80 * 10**9, _H100),
    launch_s=assumed(20e-6, "launches through Python were measured at 10 to 50 us on other chips"),
    query_s=assumed(1e-6, "a call into the driver that moves nothing"),
    memory_bytes_per_s=sourced(3.35e12, _H100),
    flops_per_s=sourced(989e12, _H100),
    host_link_bytes_per_s=sourced(64e9, "PCI Express 5.0, 16 lanes"),
    collective_fixed_s=assumed(40e-6, "small all-reduces of other libraries take 14 to 49 us"),
    link_bytes_per_s=sourced(450e9, _H100),
    queue_depth=assumed(1024, "the depth commonly observed; not documented"),
    event_query=sourced("works", _CUDA),
    event_timing=sourced(True, _CUDA),
    synchronize_covers=sourced("all_streams", _CUDA),
    async_allocate=sourced(True, _CUDA),
    stale_reads_after_async_copy=sourced(False, _CUDA),
    blocking_collectives=sourced(False, "NCCL user guide"),
    sticky_errors=sourced(True, _CUDA),
    deferred_out_of_memory=sourced(False, _CUDA),
    can_capture=sourced(True, _CUDA),
    decode_rows_max=sourced(None, "FlashInfer documentation"),
    attention_window=sourced(True, "FlashInfer documentation: window_left"),
    attention_soft_cap=sourced(True, "FlashInfer documentation: logits_soft_cap"),
    gelu_gate=sourced(True, "FlashInfer documentation: gelu_tanh_and_mul"),
    wrong_result_rows_min=assumed(None, "kernels are right"),
    int32_indices_only=sourced(False, "PyTorch documentation"),
    contiguous_only=sourced(False, "PyTorch documentation"),
    alignment_bytes=sourced(1, "PyTorch documentation"),
    has_float64=sourced(True, _CUDA),
    block_tokens_multiple=sourced(1, "FlashInfer documentation"),
    allocation_alignment_bytes=sourced(512, "PyTorch CUDACachingAllocator"),
    allocation_policy=sourced("best_fit", "PyTorch CUDACachingAllocator"),
    workspace_per_shape=assumed(False, "kernels keep nothing"),
    workspace_bytes=assumed(16 << 10, "small beside a block, visible after a few hundred shapes"),
)

P800_SHIM = replace(
    IDEAL,
    name="p800_shim",
    summary="a Kunlun P800 as PyTorch shows it today",
    memory_bytes=sourced(98304 << 20, "xpu-smi of a P800"),
    memory_bytes_per_s=assumed(1.6e12, "not published; HBM of its generation"),
    flops_per_s=assumed(345e12, "press reports of the P800 at float16"),
    host_link_bytes_per_s=assumed(32e9, "PCI Express 4.0, 16 lanes"),
    link_bytes_per_s=assumed(200e9, "not published"),
    event_timing=sourced(False, "sglang-plugin-FL kunlunxin.yaml: elapsed_time() is 0"),
    async_allocate=sourced(False, "FlagCX kunlunxin_adaptor.cc"),
    blocking_collectives=sourced(True, "vLLM-Kunlun pp_send_first.py: isend blocks"),
    sticky_errors=sourced(True, "vLLM-Kunlun #475: status 700 on every later call"),
    can_capture=sourced(True, "vLLM-Kunlun Kunlun_Graph.md: piecewise"),
    decode_rows_max=assumed(512, "1024 rows are rejected and 32 work, vLLM-Kunlun #477"),
    attention_window=sourced(True, "vLLM-Kunlun kunlun_attn.py: swa_left, max_window_size"),
    attention_soft_cap=sourced(False, "vLLM-Kunlun kunlun_attn.py: no such argument"),
    gelu_gate=sourced(False, "sglang-plugin-FL kunlunxin.yaml: gelu is broken; only swiglu"),
    int32_indices_only=sourced(True, "sglang-plugin-FL fused_moe.py"),
    contiguous_only=sourced(True, "vLLM-Kunlun layernorm.py"),
    alignment_bytes=sourced(16, "sglang-kunlun elementwise.py"),
    has_float64=sourced(False, "FlagGems _kunlunxin descriptor"),
    block_tokens_multiple=sourced(16, "vLLM-Kunlun paged_attn.py: 16, 64 or 128 tokens"),
    allocation_policy=sourced("best_fit", _SHIM),
    workspace_per_shape=assumed(True, "reported by a user of the chip; no source names the cache"),
)

XRE_NATIVE = replace(
    P800_SHIM,
    name="xre_native",
    summary="the same chip through its native runtime, strict",
    attention_window=sourced(False, "vLLM-Kunlun: a build of kunlun_ops has no max_window_size"),
    event_query=sourced("unsupported", _XRE),
    synchronize_covers=sourced("default_stream", _XRE),
    stale_reads_after_async_copy=sourced(True, "FlagGems, C++ over the native runtime"),
    can_capture=sourced(False, _XRE),
    allocation_policy=assumed("first_fit", "not published; the plainest"),
    allocation_alignment_bytes=assumed(1024, "not published; the larger of the usual two"),
)

ADVERSARIAL = replace(
    XRE_NATIVE,
    name="adversarial",
    summary="every trap at once, tighter than any chip has them",
    event_query=sourced("always_true", "XPU_DUMMY_EVENT=1 in vLLM-Kunlun's setup_env.sh"),
    deferred_out_of_memory=assumed(True, _TRAP),
    decode_rows_max=assumed(64, _TRAP),
    wrong_result_rows_min=assumed(96, "vLLM-Kunlun moe_fc is wrong from 1024 rows; earlier here"),
    alignment_bytes=sourced(16, "sglang-kunlun elementwise.py"),
)

PROFILES: Mapping[str, Profile] = MappingProxyType(
    {profile.name: profile for profile in (IDEAL, P800_SHIM, XRE_NATIVE, ADVERSARIAL)}
)
