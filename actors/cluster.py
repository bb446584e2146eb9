"""The Ray to run on: a local one that this run starts and ends, or one that exists and is left as it was."""

from __future__ import annotations

import logging
import os
import shutil

import ray

from actors.places import NodeOffer, Places, plan
from streamrl.config import Config
from streamrl.errors import ClusterTooSmall, RunFailed

log = logging.getLogger(__name__)

START_TRIES = 3
OBJECT_STORE_BYTES = 256 << 20  # of a local Ray: rows travel through our own segments, Ray carries only small messages
ENVIRONMENT = {
    "RAY_worker_niceness": "0",  # Ray's default of 15 lets any other process of the machine starve engine and learner
}


class Cluster:
    """A connection to Ray. ``own`` says whether this run started it, and so must end it."""

    def __init__(self, config: Config, run_id: str) -> None:
        self._config = config
        self._namespace = f"streamrl-{run_id}"
        self.own = config.cluster.address is None

    def connect(self) -> None:
        """Start or join; RunFailed when no cluster answers."""
        cluster = self._config.cluster
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        options: dict = {"namespace": self._namespace, "log_to_driver": False, "configure_logging": False}
        if cluster.env:
            options["runtime_env"] = {"env_vars": cluster.env}
        if self.own:
            options |= {"num_cpus": cluster.num_cpus, "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES, "address": "local"}
        else:
            options["address"] = cluster.address
        try:
            self._init(options)
        except Exception as error:  # Ray raises connection, runtime, value and authentication errors of many classes here
            what = "a local Ray must start" if self.own else f"cluster.address={cluster.address!r} must name a running Ray that lets us in"
            raise RunFailed(f"{what}, got {type(error).__name__}: {error}; see docs/cluster.md") from error
        log.info("%s Ray at %s", "started a local" if self.own else "joined", ray.get_runtime_context().gcs_address)

    def place(self) -> Places:
        """Where the actors go. What the run asks for must exist: a missing GPU would otherwise be waited for without end."""
        driver = ray.get_runtime_context().get_node_id()
        offers = [
            NodeOffer(node["NodeID"], node["NodeManagerAddress"], node["Resources"].get("GPU", 0.0), node["Resources"]) for node in ray.nodes() if node["Alive"]
        ]
        places = plan(self._config, driver, offers)
        if driver in places.stores:
            self._check_memory()
        return places

    def _init(self, options: dict) -> None:
        """Ray gives its node 30 s to start, which a busy machine may miss: a local one is tried again."""
        for attempt in range(1, START_TRIES + 1):
            try:
                ray.init(**options)
                return
            except Exception as error:
                ray.shutdown()
                if attempt == START_TRIES or not self.own or "timed out" not in str(error):
                    raise
                log.warning("the local Ray did not start in time (try %d of %d): %s", attempt, START_TRIES, error)

    def _check_memory(self) -> None:
        """Of this node; the stores of other nodes check theirs when they open."""
        config = self._config
        free = shutil.disk_usage(config.dataplane.shm_dir).free
        if config.dataplane.capacity_bytes > free:
            raise ClusterTooSmall(
                f"dataplane.capacity_bytes must fit into {config.dataplane.shm_dir}, got {config.dataplane.capacity_bytes:,} bytes with {free:,} free; "
                "lower dataplane.capacity_bytes or free shared memory"
            )

    def disconnect(self) -> None:
        """End an own Ray; leave a joined one as it was."""
        ray.shutdown()
