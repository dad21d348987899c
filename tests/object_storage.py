"""An S3 server on the loopback, and objects on it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def s3_server() -> Iterator[str]:
    """The address of a server that runs inside."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def lead_to(address: str, patch: pytest.MonkeyPatch) -> None:
    """Set the variables that S3 clients read, and forget earlier connections."""
    import s3fs

    facts = {"AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "key"}
    facts |= {"AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in facts.items():
        patch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()


def client(address: str) -> Any:
    """An S3 client of boto3."""
    import boto3

    return boto3.client("s3", endpoint_url=address)


def put(address: str, bucket: str, objects: Mapping[str, bytes]) -> str:
    """Make these objects in a bucket, which is made if it is missing; its address."""
    from moto.core import DEFAULT_ACCOUNT_ID
    from moto.s3.models import s3_backends

    client(address).create_bucket(Bucket=bucket)
    backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]  # in this process: no request per object
    for key, content in objects.items():
        backend.put_object(bucket, key, content)
    return f"s3://{bucket}"


def put_folder(address: str, bucket: str, folder: Path) -> str:
    """Make every file below a folder an object; the bucket's address."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return put(address, bucket, {f.relative_to(folder).as_posix(): f.read_bytes() for f in files})
