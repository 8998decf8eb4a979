"""Translates settings of s3fs, gcsfs and adlfs for obstore."""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch_ckpt.stores.limits import Limits


def _table(text: str) -> dict[str, str]:
    """Maps each option on the right, and the name on the left itself, to the name on the left."""
    rows = (line.split() for line in text.strip().splitlines())
    return {name.strip(":"): row[0].strip(":") for row in rows for name in row}


#: obstore's names, and the options of fsspec's file systems that mean the same. A dot leads into a
#: dict. "ignored" options have no effect on what is stored; "_" precedes special treatment.
_NAMES = {
    "s3": _table("""
        access_key_id: key username client_kwargs.aws_access_key_id
        secret_access_key: secret password client_kwargs.aws_secret_access_key
        session_token: token client_kwargs.aws_session_token
        endpoint: endpoint_url client_kwargs.endpoint_url
        region: client_kwargs.region_name
        skip_signature: anon
        request_payer: requester_pays s3_additional_kwargs.RequestPayer
        server_side_encryption: s3_additional_kwargs.ServerSideEncryption
        sse_kms_key_id: s3_additional_kwargs.SSEKMSKeyId
        sse_bucket_key_enabled: s3_additional_kwargs.BucketKeyEnabled
        virtual_hosted_style_request:
        unsigned_payload:
        _style: config_kwargs.s3.addressing_style
        _profile: profile
        _authority: ca_bundle client_kwargs.verify
        ignored: use_ssl client_kwargs.use_ssl config_kwargs.signature_version
        ignored: config_kwargs.connect_timeout config_kwargs.read_timeout
        ignored: config_kwargs.retries config_kwargs.max_pool_connections
        """),
    "gs": _table("""
        base_url: endpoint_url
        application_credentials: service_account
        service_account_key:
        bearer_token:
        skip_signature: anon
        _token: token
        ignored: project consistency cache_timeout
        """),
    "az": _table("""
        account_name:
        account_key:
        sas_key: sas_token
        tenant_id:
        client_id:
        client_secret:
        token:
        endpoint: endpoint_url
        skip_signature: anon
        use_azure_cli:
        _connection: connection_string
        _host: account_host
        """),
    "http": _table("""
        _headers: headers
        _authority: ca_bundle
        """),
}
_IGNORED = re.compile(
    "asynchronous|loop|cache_regions|default_block_size|default_cache_type|default_fill_cache"
    "|max_concurrency|skip_instance_cache|use_listings_cache|version_aware|block_?size"
)
_CONNECTION = {
    "AccountName": "account_name",
    "AccountKey": "account_key",
    "SharedAccessSignature": "sas_key",
    "BlobEndpoint": "endpoint",
}
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    "http": (),
}
# obstore's default.
_REGION = "us-east-1"
#: Credentials that obstore finds on its own.
_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
# Ends of the names of options whose values may appear in messages, and values that are words.
_PUBLIC = ("endpoint", "url", "region", "host", "verify", "bundle", "style", "_name", "profile")
_WORDS = ("anon", "cloud", "google_default")


class Options:
    """Settings that a caller has passed as ``storage_options``. They may be secret.

    ``repr`` has only their names. An Options object cannot be pickled.
    """

    __slots__ = ("_retry", "_values")

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        if not isinstance(values or {}, Mapping):
            raise TypeError("storage_options must be a dict")
        self._values = dict(values or {})
        self._retry = self._values.pop("retry_seconds", None)

    def __repr__(self) -> str:
        return f"Options({', '.join(map(str, self._values))})"

    def __reduce__(self) -> str:
        raise TypeError("storage_options have secrets and cannot be pickled. Pass them again.")

    def values(self) -> dict[str, Any]:
        """Returns the options, without ``retry_seconds``, which no library knows."""
        return dict(self._values)

    def limits(self) -> Limits:
        """Returns the time limits that the options set.

        Raises:
            ValueError: a limit is not a number of seconds above 0.
        """
        config = self._values.get("config_kwargs") or {}
        given = {
            "connect": config.get("connect_timeout"),
            "progress": config.get("read_timeout"),
            "retry": self._retry,
        }
        return Limits(**{name: value for name, value in given.items() if value is not None})

    def secrets(self) -> list[str]:
        """Returns all texts of the options except those that messages may have."""
        return [
            value.decode(errors="replace") if isinstance(value, bytes) else value
            for name, value in _flat(self._values)
            if isinstance(value, str | bytes) and value not in _WORDS and not name.endswith(_PUBLIC)
        ]


def _flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yields each option that is not a dict, with the names of the dicts above it."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}.")
        elif value is not None:
            yield f"{above}{name}", value


class Config(NamedTuple):
    """Arguments for obstore.

    Attributes:
        values: the configuration of the store.
        client: ``client_options``.
        credentials: ``credential_provider``; None for obstore's own search.
        endpoint: URL of the server; "" for the provider's own.
        region: the region of S3.
    """

    values: dict[str, Any]
    client: dict[str, Any]
    credentials: Callable[[], Any] | None = None
    endpoint: str = ""
    region: str = ""

    def __repr__(self) -> str:
        return f"Config({', '.join(self.values)})"


def s3fs_variables() -> dict[str, str]:
    """Returns the options that s3fs reads from the environment."""
    names = ("endpoint_url", "key", "secret", "token")
    found = {name: os.environ.get(f"FSSPEC_S3_{name.upper()}", "") for name in names}
    return {name: value for name, value in found.items() if value}


def obstore_config(kind: str, options: Options, account: str = "") -> Config:
    """Translates options for a kind of store: "s3", "gs", "az" or "http".

    Raises:
        ValueError: an option is unknown or cannot be translated. The message names the options
            that can be used, and no value.
        ImportError: a profile needs boto3, which is not installed.
    """
    given, names = options.values(), _NAMES[kind]
    if kind == "s3":
        given = s3fs_variables() | given
    special = {"_account": account} if account else {}
    for name in {"http": ("headers",), "gs": ("token",)}.get(kind, ()):  # May be dicts.
        if isinstance(given.get(name), Mapping):
            special[f"_{name}"] = given.pop(name)
    values: dict[str, Any] = {}
    unknown = []
    for name, value in _flat(given):
        theirs = "ignored" if _IGNORED.fullmatch(name) else names.get(name, "")
        if not theirs or name.startswith("_"):
            unknown.append(name)
        else:
            (special if theirs.startswith("_") else values)[theirs] = value
    values.pop("ignored", None)
    if unknown:
        known = ", ".join(sorted(name for name in names if name[0] != "_" and name != "ignored"))
        raise ValueError(
            f"storage_options: {', '.join(unknown)} cannot be used for {kind}:// with obstore. The "
            f"options are {known}."
        )
    return _with_special(kind, values, special)


def _with_special(kind: str, values: dict[str, Any], special: dict[str, Any]) -> Config:
    client: dict[str, Any] = {}
    authority = special.get("_authority", os.environ.get("AWS_CA_BUNDLE"))
    if authority is False:
        raise ValueError(
            "storage_options: without verification, any server would be accepted. Pass the path "
            "of the authority's certificate as verify."
        )
    if isinstance(authority, str | Path):
        client["root_certificate"] = Path(authority).read_bytes()
    if "_style" in special:
        values["virtual_hosted_style_request"] = special["_style"] == "virtual"
    for pair in filter(None, special.get("_connection", "").split(";")):
        name, _, value = pair.partition("=")
        if name in _CONNECTION:
            values[_CONNECTION[name]] = value
    if "_host" in special:
        values["endpoint"] = f"https://{special['_host']}"
    if "_account" in special:
        values.setdefault("account_name", special["_account"])
    if "_headers" in special:
        client["default_headers"] = dict(special["_headers"])
    if "_token" in special:
        values |= _google_token(special["_token"])
    # The caller or the environment has named an endpoint without encryption.
    variables = (os.environ.get(name, "") for name in _ENDPOINTS[kind])
    endpoint = values.get("endpoint") or values.get("base_url") or next(filter(None, variables), "")
    if endpoint and not re.fullmatch(r"https?://[^\s?#@/]+(/[^\s?#@]*)?", str(endpoint)):
        raise ValueError(
            "storage_options: the endpoint is not a URL such as https://host:9000, without a user "
            "name and a query"
        )
    if endpoint.startswith("http://"):
        client["allow_http"] = True
    if kind != "s3":
        return Config(values, client, None, str(endpoint))
    credentials = _aws_credentials(values, special.get("_profile"))
    regions = (values.get("region"), *map(os.environ.get, ("AWS_REGION", "AWS_DEFAULT_REGION")))
    return Config(values, client, credentials, str(endpoint), next(filter(None, regions), _REGION))


def _google_token(token: Any) -> dict[str, Any]:
    """Translates the option ``token`` of gcsfs."""
    if isinstance(token, Mapping):
        return {"service_account_key": json.dumps(dict(token))}
    if token == "anon":
        return {"skip_signature": True}
    if token in ("google_default", "cloud"):
        return {}
    if isinstance(token, str | Path) and Path(token).is_file():
        return {"application_credentials": str(token)}
    raise ValueError(
        "storage_options: token must be the path of a file, a dict, 'anon', 'google_default' or "
        "'cloud'. Pass an OAuth token as bearer_token."
    )


def _aws_credentials(values: dict[str, Any], profile: str | None) -> Callable[[], Any] | None:
    """Returns boto3's credentials for a profile.

    If no profile is given, and obstore, which does not read AWS's files, would find no credentials,
    returns the credentials of the default profile. Returns None if obstore finds credentials."""
    if "access_key_id" in values or values.get("skip_signature"):
        return None
    profile = profile or os.environ.get("AWS_PROFILE")
    file = os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")
    found = any(map(os.environ.get, _CREDENTIALS)) or not Path(file).expanduser().is_file()
    if profile is None and found:
        return None
    try:
        boto3 = importlib.import_module("boto3")
        provider = importlib.import_module("obstore.auth.boto3").Boto3CredentialProvider
    except ImportError:
        raise ImportError(
            f"the profile {profile or 'default'} of AWS needs the package boto3. Install boto3, or "
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."
        ) from None
    session = boto3.Session(profile_name=profile)
    if session.region_name:
        values.setdefault("region", session.region_name)
    credentials: Callable[[], Any] = provider(session)
    return credentials
