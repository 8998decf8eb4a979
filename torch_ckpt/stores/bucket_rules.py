"""Checks the rules of a bucket: what ends unfinished uploads and old versions of objects.

The rules of S3 are read with the optional package boto3.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch_ckpt._base.formatting import plural
from torch_ckpt.stores.object_store import Service
from torch_ckpt.stores.probe import Check
from torch_ckpt.stores.redaction import Redactor
from torch_ckpt.stores.storage_options import s3fs_variables
from torch_ckpt.stores.urls import Root

# Seconds for a connection, and for an answer.
_LIMIT = 10

_ABORT, _EXPIRE = "AbortIncompleteMultipartUpload", "NoncurrentVersionExpiration"
_UPLOADS, _VERSIONS = "unfinished uploads end", "deletions free storage"


def s3_client(service: Service) -> Any:
    """Returns boto3's client for a service, with the credentials of the environment.

    Raises:
        ImportError: boto3 is not installed.
    """
    boto3 = importlib.import_module("boto3")
    config = importlib.import_module("botocore.config").Config(
        connect_timeout=_LIMIT, read_timeout=_LIMIT, retries={"total_max_attempts": 1}
    )
    given = s3fs_variables()
    return boto3.Session().client(
        "s3",
        endpoint_url=service.endpoint or None,
        region_name=service.region or None,
        aws_access_key_id=given.get("key"),
        aws_secret_access_key=given.get("secret"),
        aws_session_token=given.get("token"),
        config=config,
    )


def check_bucket(root: Root, open_client: Callable[[], Any]) -> list[Check]:
    """Checks first that unfinished uploads end, and then that deletions free storage.

    Args:
        root: the URL whose objects the rules must cover.
        open_client: returns boto3's client.
    """
    if root.kind == "az":
        return [Check(_UPLOADS, "holds", "Azure removes uncommitted blocks after a week")]
    if root.kind != "s3":
        return [Check(_UPLOADS, "unknown", "only the rules of S3 can be read")]
    checks: list[Check] = []
    try:
        client = open_client()
        rules = [rule for rule in _rules(client, root) if _covers(rule, root)]
        days = [rule[_ABORT]["DaysAfterInitiation"] for rule in rules if _ABORT in rule]
        found = f"a rule ends them after {plural(min(days, default=0), 'day')}"
        absent = "no rule ends the uploads of killed jobs, whose parts no listing shows"
        checks.append(Check.of(_UPLOADS, bool(days), found, absent))
        versions = client.get_bucket_versioning(Bucket=root.bucket).get("Status") == "Enabled"
        expires = any(_EXPIRE in rule for rule in rules)
        found = "a rule expires old versions" if versions else "the bucket keeps no old versions"
        absent = f"the bucket keeps old versions. Add a rule with {_EXPIRE}"
        checks.append(Check.of(_VERSIONS, expires or not versions, found, absent))
    except ImportError:
        checks.append(Check(_UPLOADS, "unknown", "the rules cannot be read. Install boto3"))
    except Exception as error:  # boto3 has classes of its own for each service.
        reason = Redactor()(f"the rules cannot be read: {error}").split("\n")[0]
        checks.append(Check(_VERSIONS if checks else _UPLOADS, "unknown", reason))
    return checks


def _rules(client: Any, root: Root) -> list[dict[str, Any]]:
    try:
        answer = client.get_bucket_lifecycle_configuration(Bucket=root.bucket)
    except Exception as error:
        if "NoSuchLifecycleConfiguration" in str(error):
            return []
        raise
    return [rule for rule in answer["Rules"] if rule["Status"] == "Enabled"]


def _covers(rule: dict[str, Any], root: Root) -> bool:
    """True if a rule holds for all objects beneath a URL, whatever their sizes and tags."""
    conditions = rule.get("Filter", {"Prefix": rule.get("Prefix", "")})
    prefix: str = conditions.get("Prefix", "")
    return conditions.keys() <= {"Prefix"} and _beneath(root).startswith(prefix)


def suggested_rule(root: Root) -> dict[str, Any] | None:
    """Returns the rule that ends unfinished uploads after a day, in the form of S3 or Google; None
    for other stores."""
    prefix = _beneath(root)
    if root.kind == "s3":
        rule = {"ID": "torch_ckpt", "Status": "Enabled", "Filter": {"Prefix": prefix}}
        return {**rule, _ABORT: {"DaysAfterInitiation": 1}}
    if root.kind == "gs":
        prefixes = {"matchesPrefix": [prefix]} if prefix else {}
        return {"action": {"type": _ABORT}, "condition": {"age": 1, **prefixes}}
    return None


def _beneath(root: Root) -> str:
    """Returns the prefix of the keys of all objects beneath a URL."""
    return f"{root.prefix}/".lstrip("/")
