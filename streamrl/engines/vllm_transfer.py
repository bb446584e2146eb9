"""The plug-in that vLLM loads in each of its processes (entry point group ``vllm.general_plugins``).

It adds one name to vLLM's weight-transfer registry and imports nothing else of streamrl until an engine asks for that name, so it costs other users
of vLLM nothing; a vLLM without the registry is left alone.
"""

from __future__ import annotations

import logging

BACKEND = "streamrl"


def register() -> None:
    """Idempotent: vLLM calls it in the front end, in the engine core and in every worker."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:
        logging.getLogger(__name__).debug("this vLLM has no weight-transfer registry; streamrl needs 0.32 or newer")
        return
    try:
        WeightTransferEngineFactory.register_engine(BACKEND, "streamrl.engines.vllm_receiver", "SnapshotReceiver")
    except ValueError:  # registered before, in this process
        return
