"""Loads the shard a group asks for, and keeps it as long as the next group asks for the same."""

from dataclasses import dataclass

import structlog
import torch

from backends.interface import Device, KVSpec, WeightForm
from backends.plugin import ModelLoadPlan
from chip_worker.checkpoint import ModelFingerprint
from chip_worker.errors import ConfigurationError
from chip_worker.kv_groups import KVGroups, model_kv_groups
from chip_worker.model_config import ModelConfig
from chip_worker.models.decoder_weights import DecoderWeights
from chip_worker.models.model import Model
from chip_worker.models.registry import find_model
from chip_worker.tensor_parallel import ShardPlan, plan_shard
from chip_worker.weights import ShardReader, open_checkpoint

SHARD_LOADED = "shard.loaded"
SHARD_EXPANDED = "shard.weights_expanded"
SHARD_NOT_NATIVE = "shard.no_native_weights"

_log = structlog.get_logger()


@dataclass(frozen=True)
class LoadedShard:
    """A rank's weights with what they belong to; outlives an epoch."""

    model: type[Model]
    config: ModelConfig
    shard: ShardPlan
    weights: DecoderWeights
    dtype: torch.dtype

    @property
    def kv_groups(self) -> KVGroups:
        """Which layers of the model share block tables."""
        return model_kv_groups(self.config)

    @property
    def dtype_name(self) -> str:
        """Such as "float32"."""
        return str(self.dtype).removeprefix("torch.")


class ShardLoader:
    """The open checkpoint and at most one shard of it on the chip."""

    def __init__(self, model_path: str, weights: str = "auto") -> None:
        """Opens the checkpoint and checks its tensors, loads none. Raises ModelError.

        weights: one of `chip_worker.config.WEIGHTS`.
        """
        self._weights = "bf16" if weights == "auto" else weights
        self._checkpoint = open_checkpoint(model_path)
        self._model, self._config = find_model(self._checkpoint)
        self._loaded: LoadedShard | None = None

    def fingerprint(self) -> ModelFingerprint:
        """Identity of the model."""
        return self._checkpoint.fingerprint(self._config, self._weights)

    def check_device(self, device: Device) -> None:
        """Raises ConfigurationError if the chip cannot hold weights as it is told to."""
        needed = {"int8": {WeightForm.Q8_0}, "native": set(WeightForm)}.get(self._weights, set())
        if not needed <= device.weight_forms:
            raise ConfigurationError(
                f"--weights is {self._weights}, but this chip has no kernels for weights of 8 or 4 "
                "bits; choose --weights bf16, or the cpu backend with its native kernels"
            )

    @property
    def config(self) -> ModelConfig:
        """What the checkpoint says about its model."""
        return self._config

    @property
    def kv_groups(self) -> KVGroups:
        """Which layers of the model share block tables."""
        return model_kv_groups(self._config)

    def plan(self, rank: int, world_size: int, kv_policy: str) -> ShardPlan:
        """The shard of a rank. Raises ModelError naming the sizes that work."""
        return plan_shard(self._config, rank, world_size, kv_policy)

    def load_plan(self, shard: ShardPlan, device: Device, dtype: torch.dtype) -> ModelLoadPlan:
        """What loading the shard in `dtype` will take of the device, for the backend."""
        reader = ShardReader(self._checkpoint, device, dtype, self._weights)
        weight_bytes = sum(map(reader.bytes_of, self._model.weight_pieces(self._config, shard)))
        return ModelLoadPlan(self._config.architecture, weight_bytes, shard.rank, shard.world_size)

    @property
    def loaded(self) -> LoadedShard:
        """The shard on the chip."""
        assert self._loaded is not None, "weights are loaded before a rank enters its group"
        return self._loaded

    def load(self, shard: ShardPlan, device: Device, dtype: torch.dtype) -> None:
        """Puts the shard on the chip, unless it is there. Raises ModelError or OutOfMemory.

        dtype: of the weights, the same at every call.
        """
        if self._loaded is not None and self._loaded.shard == shard:
            return
        # Dropped first: two shards may not fit the chip.
        self._loaded = None
        reader = ShardReader(self._checkpoint, device, dtype, self._weights)
        weights = self._model.load(self._config, shard, reader)
        self._loaded = LoadedShard(self._model, self._config, shard, weights, dtype)
        matrices = {form.value: count for form, count in reader.forms.items()}
        _log.info(SHARD_LOADED, weights=self._weights, matrices=matrices, bytes=reader.bytes_read)
        if reader.cut:
            _log.warning(
                SHARD_EXPANDED,
                matrices=len(reader.cut),
                first=min(reader.cut),
                reason="this chip's columns begin or end within a block; another number of chips "
                "in the group may not cut blocks",
            )
        elif self._weights == "native" and set(reader.forms) == {WeightForm.PLAIN}:
            _log.warning(
                SHARD_NOT_NATIVE,
                model=self._checkpoint.path,
                reason="--weights is native, but no matrix of the checkpoint is Q8_0, Q4_0 or "
                "Q4_1: they are held as with bf16; give a GGUF file of these types, or --weights "
                "int8",
            )

    def close(self) -> None:
        """Forgets the shard and closes the checkpoint."""
        self._loaded = None
        self._checkpoint.close()


def kv_spec(config: ModelConfig, shard: ShardPlan, block_tokens: int, dtype: torch.dtype) -> KVSpec:
    """What a rank keeps in a block of `block_tokens`."""
    return KVSpec(
        layers=model_kv_groups(config).layers,
        kv_heads=len(shard.kv_heads),
        head_size=config.head_size,
        block_tokens=block_tokens,
        dtype=dtype,
    )
