"""Inside vLLM's worker: takes up one snapshot. Each worker maps the file itself and hashes every tensor before it touches the model.

Guarantees: a snapshot that fails its hashes leaves the model as it was (the error then starts with ``REFUSED``); after a load every parameter of
the model has been written. Layer-wise reload is what undoes and redoes the repacking of linear layers (CPU) and quantisation. It wants all parts of a
fused layer, so with an adapter the whole base is read again from the model's folder, merged on the way.
Doesn't pause anything: whoever calls has paused generation. Doesn't compare names with the learner's model; the front end has done that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from vllm.config.load import LoadConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from streamrl.engines.vllm_marks import REFUSED
from streamrl.errors import WeightMismatch
from streamrl.protocol.weights import AdapterRecord, WeightManifest
from streamrl.weights.adapter import check_base, merged
from streamrl.weights.reader import read_tensors, verify


@dataclass
class SnapshotInit(WeightTransferInitInfo):
    """Nothing to agree on: the manifest says everything."""


@dataclass
class SnapshotUpdate(WeightTransferUpdateInfo):
    """A :class:`WeightManifest` as plain values."""

    manifest: dict[str, Any] = field(default_factory=dict)


class SnapshotReceiver(WeightTransferEngine[SnapshotInit, SnapshotUpdate]):
    """vLLM calls start, update (once: one file is one version), finish."""

    init_info_cls = SnapshotInit
    update_info_cls = SnapshotUpdate
    supports_draft_weight_update = False
    _base_digests: dict[str, str] | None = None  # of the base that was last found to be the learner's

    def init_transfer_engine(self, init_info: SnapshotInit) -> None:
        """No rendezvous."""

    def start_weight_update(self) -> None:
        """The model stays as it is until the snapshot has been verified."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    @torch.no_grad()
    def receive_weights(self, update_info: SnapshotUpdate) -> None:
        manifest = msgspec.convert(update_info.manifest, WeightManifest)
        try:
            verify(manifest)
            weights = read_tensors(manifest, verify=False) if manifest.adapter is None else self._merged(manifest, manifest.adapter)
        except WeightMismatch as error:
            raise WeightMismatch(REFUSED + str(error)) from error
        expected = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)
        load: Callable[..., set[str] | None] = self.model.load_weights  # type: ignore[assignment]
        loaded = load(weights)
        finalize_layerwise_reload(self.model, self.model_config)
        _repack_tied(self.model)
        missing = sorted(expected - set(loaded)) if loaded is not None else []
        if missing:
            raise WeightMismatch(f"version {manifest.version} must write every parameter of the engine's model, got none for {', '.join(missing[:5])}")

    def _merged(self, manifest: WeightManifest, record: AdapterRecord) -> Iterator[tuple[str, torch.Tensor]]:
        """The base with the adapter in it. WeightMismatch at once for another base than the learner's, which is looked at once."""
        if record.base != self._base_digests:
            check_base(record, self._base())
            self._base_digests = record.base
        adapter = {name: tensor.to(self.device) for name, tensor in read_tensors(manifest, verify=False)}
        return merged(record, adapter, self._base(), self.model_config.dtype)

    def _base(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of the model's folder under their names there."""
        where = self.vllm_config.load_config
        loader = DefaultModelLoader(LoadConfig(download_dir=where.download_dir, use_tqdm_on_load=False))
        return loader.get_all_weights(self.model_config, self.model)

    def finish_weight_update(self) -> None:
        """All was done in ``receive_weights``."""

    def shutdown(self) -> None:
        """Nothing is kept open between updates."""


def _repack_tied(model: torch.nn.Module) -> None:
    """A tied output head is given no tensor of its own, so layer-wise reload leaves its packed copy (CPU) at the old weights: pack it again."""
    owners: dict[int, list[tuple[UnquantizedEmbeddingMethod, torch.nn.Module]]] = defaultdict(list)
    for module in model.modules():
        method, weight = getattr(module, "quant_method", None), getattr(module, "weight", None)
        if isinstance(method, UnquantizedEmbeddingMethod) and isinstance(weight, torch.Tensor):
            owners[weight.data_ptr()].append((method, module))
    for modules in owners.values():
        if len(modules) > 1:
            for method, module in modules:
                method.process_weights_after_loading(module)
