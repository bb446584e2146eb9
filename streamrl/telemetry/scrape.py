"""Getting the metric pages of a run's actors, and making one block of OpenMetrics of them: what the recorder keeps and ``streamrl top`` draws.

Guarantees: all pages of a round are asked for at once, each with the same hard deadline, and a page that is late, broken or too large counts as no
answer; a block has every family once, the target labels first in every sample, and one time for all of them. Proxies of the environment are not used.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from streamrl.telemetry.targets import Target

if TYPE_CHECKING:
    from aiohttp import ClientSession

MAX_PAGE_BYTES = 8 << 20  # of one actor; ours are about 50 kB
_HEADERS = {"Accept": "application/openmetrics-text; version=1.0.0", "Accept-Encoding": "identity"}  # packing it would be work for the actor
_SAMPLE = re.compile(r'([a-zA-Z_:][\w:]*)(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})? (\S+)')


@dataclass
class Family:
    """One metric family of all actors: its type, help and samples, each a series and its value as text."""

    kind: str = "unknown"
    help: str = ""
    samples: list[tuple[str, str]] = field(default_factory=list)


def session() -> ClientSession:
    """To be used by one event loop, and closed."""
    import aiohttp  # half a second, for those who scrape

    return aiohttp.ClientSession(headers=_HEADERS, trust_env=False)


async def fetch_all(client: ClientSession, targets: Iterable[Target], limit_s: float) -> dict[Target, str | None]:
    """The page of every target; None for one that gave none within ``limit_s``."""
    targets = list(targets)
    pages = await asyncio.gather(*(_fetch(client, target, limit_s) for target in targets))
    return dict(zip(targets, pages, strict=True))


async def _fetch(client: ClientSession, target: Target, limit_s: float) -> str | None:
    from aiohttp import ClientError

    try:
        async with asyncio.timeout(limit_s), client.get(f"http://{target.address}/metrics", allow_redirects=False) as reply:
            if reply.status != 200:
                return None
            body = bytearray()
            async for chunk in reply.content.iter_chunked(1 << 16):
                body += chunk
                if len(body) > MAX_PAGE_BYTES:
                    return None
            return body.decode()
    except (OSError, TimeoutError, ValueError, ClientError):
        return None


def merge(run: str, pages: Mapping[Target, str | None]) -> dict[str, Family]:
    """All pages by family, with the labels of their targets, and ``up`` for who answered."""
    families = {"up": Family("gauge", "1 for an actor whose page answered, 0 for one whose page did not")}
    for target, page in pages.items():
        labels = f'run="{escape(run)}",role="{escape(target.role)}",actor="{escape(target.actor)}"'
        families["up"].samples.append((f"up{{{labels}}}", "0" if page is None else "1"))
        for line_family, series, value in _samples(page or "", labels, families):
            families.setdefault(line_family, Family()).samples.append((series, value))
    return families


def _samples(page: str, labels: str, families: dict[str, Family]) -> Iterator[tuple[str, str, str]]:
    """(family, series, value) of a page's samples; what is declared goes to ``families``. Exemplars and times of the page are left out."""
    family = ""
    for line in page.split("\n"):
        if line.startswith("#"):
            family = _declared(line, families) or family
        elif found := _SAMPLE.match(line):
            name, own, value = found.groups()
            yield (family if name.startswith(family) and family else name), f"{name}{{{labels},{own}}}" if own else f"{name}{{{labels}}}", value


def _declared(line: str, families: dict[str, Family]) -> str | None:
    """The family that a TYPE or HELP line speaks of; the text format names a counter with its suffix, OpenMetrics without."""
    words = line.split(" ", 3)
    if len(words) < 4 or words[1] not in ("TYPE", "HELP"):
        return None
    name = words[2].removesuffix("_total")
    one = families.setdefault(name, Family())
    if words[1] == "TYPE":
        one.kind = "unknown" if words[3] == "untyped" else words[3]
    else:
        one.help = words[3]
    return name


def block(families: Mapping[str, Family], time: float, declared: set[str]) -> str:
    """The round as OpenMetrics lines, without the end mark. Families that are not in ``declared`` are described, and added to it."""
    lines = []
    for name, family in families.items():
        if name not in declared and family.samples:
            declared.add(name)
            lines += [f"# TYPE {name} {family.kind}", f"# HELP {name} {family.help}"]
        lines += [f"{series} {value} {time:.3f}" for series, value in family.samples]
    return "\n".join([*lines, ""])


def escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
