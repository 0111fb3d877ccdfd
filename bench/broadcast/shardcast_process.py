"""Baseline process of bench_broadcast.py: the package `shardcast`.

Run by an interpreter that has the package. Commands and answers are those of node.py.
The package keeps scratch files beside its own code, so each process imports a copy of its own:
several on one machine would overwrite each other's. Clients download from the origin, or each from
the middle node before it; a middle node asks again only after 2 to 15 s when a shard is not there
yet.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import random
import shutil
import socketserver
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PORT = 8000
SHARD_BYTES = 50_000_000
"""Its default."""
POLL_S = 0.05


def tell(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def import_copy(scratch: Path) -> Any:
    found = importlib.util.find_spec("shardcast")
    assert found is not None and found.origin is not None  # noqa: PT018
    shutil.copytree(Path(found.origin).parent, scratch / "package" / "shardcast")
    sys.path.insert(0, str(scratch / "package"))
    import shardcast

    logging.getLogger("shardcast.utils").setLevel(logging.ERROR)
    # Its clients hang up on shards that take too long and ask again; the server tells it at length.
    socketserver.BaseServer.handle_error = lambda *_: None  # type: ignore[method-assign]
    return shardcast


def checksum(path: Path) -> str:
    from shardcast.utils import compute_checksum

    return str(compute_checksum(str(path)))


def run_origin(shardcast: Any, arguments: argparse.Namespace, scratch: Path) -> None:
    """Serve versions to the clients, each a file cut into shards."""
    data, image = scratch / "data", scratch / "image"
    data.mkdir()
    (data / "data1.bin").write_bytes(b"0")  # what its clients try first
    origin = shardcast.OriginServer(str(data), PORT)
    tell(ready=True)
    for line in sys.stdin:
        match line.split():
            case ["prepare", step, num_bytes]:
                image.write_bytes(random.Random(int(step)).randbytes(int(num_bytes)))
                tell(hash=checksum(image))
            case ["publish"]:
                at = time.monotonic()
                origin.broadcast(str(image), arguments.shard_bytes)
                tell(at=at)


def run_middle(shardcast: Any, arguments: argparse.Namespace, scratch: Path) -> None:
    """Download versions shard by shard and serve them to the next."""
    data = scratch / "data"
    data.mkdir()
    (data / "data1.bin").write_bytes(b"0")
    upstream = [f"http://{arguments.upstream}:{PORT}"]
    middle = shardcast.MiddleNode(upstream, str(data), PORT, check_interval=POLL_S)
    tell(ready=True)
    for line in sys.stdin:
        match line.split():
            case ["receive", step]:
                while f"v{step}" not in middle.processed_versions:
                    time.sleep(POLL_S)
                at = time.monotonic()
                whole = scratch / "whole"
                with whole.open("wb") as file:
                    for shard in sorted((data / f"v{step}").glob("shard_*.bin")):
                        file.write(shard.read_bytes())
                tell(arrived=int(step), at=at, hash=checksum(whole))


def run_client(shardcast: Any, arguments: argparse.Namespace, scratch: Path) -> None:
    """Download versions from the origin; the package verifies what it has put together."""
    client = shardcast.ClientNode([f"http://{arguments.upstream}:{PORT}"], str(scratch / "got"))
    tell(ready=True)
    for line in sys.stdin:
        match line.split():
            case ["receive", step]:
                while f"v{step}" not in client.list_available_versions():
                    time.sleep(POLL_S)
                path = Path(client.download_version(f"v{step}"))
                at = time.monotonic()
                tell(arrived=int(step), at=at, hash=checksum(path))
                path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=["origin", "middle", "client"])
    parser.add_argument("--upstream", help="host that a client downloads from")
    parser.add_argument("--shard-bytes", type=int, default=SHARD_BYTES)
    arguments = parser.parse_args()
    run = {"origin": run_origin, "middle": run_middle, "client": run_client}[arguments.role]
    with tempfile.TemporaryDirectory() as scratch:
        run(import_copy(Path(scratch)), arguments, Path(scratch))


if __name__ == "__main__":
    main()
