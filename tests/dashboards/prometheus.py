"""A real Prometheus for tests: own port, own data, loopback only; and its tool ``promtool``. Debian's packages, see ``.ci/run``."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="prometheus and promtool are not installed (apt-get install --no-install-recommends prometheus)",
)
_CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}
rule_files: {rules}
scrape_configs:
  - job_name: streamrl
    file_sd_configs:
      - {{files: {targets}, refresh_interval: 1s}}
"""
Series = dict[str, Any]  # {"metric": labels, "values": [[time, text], ...]}


class QueryFailed(Exception):
    """Prometheus refused a query; the message is its own."""


class Prometheus:
    """One server. ``targets``: files in file_sd form, which may come later; without any it serves the blocks that lie in ``data``."""

    def __init__(self, data: Path, *, targets: Sequence[Path] = (), rules: Sequence[Path] = ()) -> None:
        data.mkdir(parents=True, exist_ok=True)
        config = data / "prometheus.yml"
        config.write_text(_CONFIG.format(rules=json.dumps([str(path) for path in rules]), targets=json.dumps([str(path) for path in targets])))
        if not targets:
            config.write_text("{}")
        self.url = f"http://127.0.0.1:{_free_port()}"
        self._said = (data / "server.log").open("w+")
        arguments = [f"--config.file={config}", f"--storage.tsdb.path={data}", f"--web.listen-address={self.url.removeprefix('http://')}"]
        self._process = subprocess.Popen(["prometheus", *arguments, "--storage.tsdb.retention.time=10y"], stdout=self._said, stderr=subprocess.STDOUT)
        self._wait_until_ready(limit_s=20)

    def range(self, query: str, start: float, end: float, step_s: float = 1.0) -> list[Series]:
        """A range query; QueryFailed when it is refused."""
        return self._get("query_range", query=query, start=start, end=end, step=step_s)["result"]

    def instant(self, query: str, at: float) -> list[Series]:
        """The value at one moment, as a range of one point."""
        return self.range(query, at, at)

    def label_values(self, label: str, matching: str, start: float, end: float) -> list[str]:
        """What Grafana asks for ``label_values(matching, label)``."""
        return self._get(f"label/{label}/values", **{"match[]": matching, "start": start, "end": end})

    def rules(self) -> list[dict[str, Any]]:
        """Every recording rule and alert with its health."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()

    def _get(self, path: str, **parameters: Any) -> Any:
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=20) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise QueryFailed(json.load(error).get("error", str(error))) from None

    def _wait_until_ready(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"{self.url}/-/ready", timeout=1).close()
                return
            except OSError:
                time.sleep(0.05)
            if self._process.poll() is not None:
                break
        self._process.kill()
        self._said.seek(0)
        raise AssertionError(f"prometheus must be ready within {limit_s} s, got:\n{self._said.read()[-2000:]}")


def promtool(*arguments: str, stdin: bytes | None = None) -> subprocess.CompletedProcess[str]:
    """Run it; the caller looks at the exit code and the text."""
    done = subprocess.run(["promtool", *arguments], input=stdin, capture_output=True, timeout=60)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
