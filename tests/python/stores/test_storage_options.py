"""Settings of s3fs, gcsfs and adlfs, translated for obstore, and kept out of all output."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.object_server import ObjectServer
from tests.python.stores.conftest import obstore_store
from torch_ckpt.stores import Options
from torch_ckpt.stores.limits import Limits
from torch_ckpt.stores.redaction import Redactor
from torch_ckpt.stores.storage_options import obstore_config


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hides the settings of this machine."""
    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_CA_BUNDLE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))


KMS = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "k"}
STYLE = {"s3": {"addressing_style": "virtual"}}
REGION = {"endpoint_url": "https://e", "region_name": "r"}


@pytest.mark.parametrize(
    ("kind", "given", "values"),
    [
        ("s3", {"key": "k", "secret": "s"}, "access_key_id secret_access_key"),
        ("s3", {"key": "k", "token": "t"}, "access_key_id session_token"),
        ("s3", {"endpoint_url": "https://e"}, "endpoint"),
        ("s3", {"client_kwargs": REGION}, "endpoint region"),
        ("s3", {"anon": True, "requester_pays": True}, "skip_signature request_payer"),
        ("s3", {"s3_additional_kwargs": KMS}, "server_side_encryption sse_kms_key_id"),
        ("s3", {"config_kwargs": STYLE}, "virtual_hosted_style_request"),
        ("s3", {"access_key_id": "k", "region": "r"}, "access_key_id region"),
        ("s3", {"use_ssl": True, "default_block_size": 5, "config_kwargs": {"retries": 3}}, ""),
        ("gs", {"token": "anon"}, "skip_signature"),
        ("gs", {"token": {"type": "service_account"}}, "service_account_key"),
        ("gs", {"token": "google_default", "project": "p"}, ""),
        ("gs", {"bearer_token": "t"}, "bearer_token"),
        ("az", {"account_name": "a", "account_key": "k"}, "account_name account_key"),
        ("az", {"sas_token": "s", "account_name": "a"}, "sas_key account_name"),
        (
            "az",
            {"connection_string": "AccountName=a;AccountKey=k==;EndpointSuffix=x"},
            "account_name account_key",
        ),
        ("az", {"client_id": "c", "client_secret": "s"}, "client_id client_secret"),
        ("http", {"headers": {"Authorization": "Bearer x"}}, ""),
    ],
)
def test_an_option_is_translated(kind: str, given: dict[str, Any], values: str) -> None:
    assert sorted(obstore_config(kind, Options(given)).values) == sorted(values.split())


def test_values_are_passed_on() -> None:
    text = "AccountName=a;AccountKey=k=="
    assert obstore_config("az", Options({"connection_string": text})).values["account_key"] == "k=="
    assert obstore_config("az", Options(), "named").values == {"account_name": "named"}
    config = obstore_config("http", Options({"headers": {"A": "b"}}))
    assert config.client == {"default_headers": {"A": "b"}}
    for endpoint, allowed in (("http://e", {"allow_http": True}), ("https://e", {})):
        assert obstore_config("s3", Options({"endpoint_url": endpoint})).client == allowed


@pytest.mark.parametrize(
    ("kind", "given", "text"),
    [
        ("s3", {"session": "SECRET"}, "session cannot be used"),
        ("s3", {"client_kwargs": {"verify": False}}, "certificate as verify"),
        ("s3", {"client_kwargs": {"other": "SECRET"}}, r"client_kwargs.other cannot .* profile"),
        ("s3", {"key_": "SECRET"}, "key_ cannot be used"),
        ("s3", {"_profile": "SECRET"}, "_profile cannot be used"),
        ("gs", {"token": "SECRET"}, "bearer_token"),
        ("az", {"credential": "SECRET"}, "credential cannot be used"),
        ("http", {"key": "SECRET"}, "key cannot be used"),
    ],
)
def test_an_option_that_cannot_be_used_is_named(
    kind: str, given: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        obstore_config(kind, Options(given))
    assert "SECRET" not in str(caught.value)


def test_a_certificate_is_read(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("certificate")
    for given in (
        {"ca_bundle": tmp_path / "ca.pem"},
        {"client_kwargs": {"verify": str(tmp_path / "ca.pem")}},
    ):
        assert obstore_config("s3", Options(given)).client == {"root_certificate": b"certificate"}


def test_variables_of_the_environment_work(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDENVIRONMENT")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    obstore_store("s3://bucket/run", {}).put("a", [memoryview(b"1")], 1)
    assert "AKIDENVIRONMENT" in server.log[0].headers["authorization"]
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv("FSSPEC_S3_ENDPOINT_URL", server.url)
    assert obstore_store("s3://bucket/run", {}).head("a").bytes == 1


@pytest.mark.parametrize("way", ["option", "variable", "default"])
def test_a_profile_is_read_by_boto3(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, way: str
) -> None:
    pytest.importorskip("boto3")
    name = "default" if way == "default" else "work"
    text = f"[{name}]\naws_access_key_id = AKIDPROFILE\naws_secret_access_key = s\n"
    (tmp_path / "credentials").write_text(text)
    options = {"endpoint_url": server.url}
    if way == "option":
        options["profile"] = "work"
    elif way == "variable":
        monkeypatch.setenv("AWS_PROFILE", "work")
    obstore_store("s3://bucket/run", options).put("a", [memoryview(b"1")], 1)
    assert "AKIDPROFILE" in server.log[0].headers["authorization"]


def test_a_profile_without_boto3_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(ImportError, match="profile work of AWS needs the package boto3"):
        obstore_config("s3", Options({"profile": "work"}))


def test_settings_of_encryption_and_payment_are_sent(server: ObjectServer) -> None:
    options = server.options | {
        "requester_pays": True,
        "s3_additional_kwargs": {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "the-key"},
    }
    obstore_store("s3://bucket/run", options).put("a", [memoryview(b"1")], 1)
    headers = server.log[0].headers
    assert headers["x-amz-server-side-encryption"] == "aws:kms"
    assert headers["x-amz-server-side-encryption-aws-kms-key-id"] == "the-key"
    assert headers["x-amz-request-payer"] == "requester"


# --- secrets --------------------------------------------------------------------------------------

PLANTED = {
    "key": "PLANTEDKEY",
    "secret": "PLANTEDSECRET",
    "client_kwargs": {"aws_session_token": "PLANTEDTOKEN"},
    "headers": [b"PLANTEDBYTES"],
    "account_key": b"PLANTEDBYTES2",
}


def test_options_set_the_limits() -> None:
    options = Options(
        {"retry_seconds": 7, "config_kwargs": {"connect_timeout": 2, "read_timeout": 3}, "key": "k"}
    )
    assert options.limits() == Limits(connect=2, progress=3, retry=7)
    assert "retry_seconds" not in options.values()
    assert Options().limits() == Limits()


@pytest.mark.parametrize("wrong", [0, -1, "soon", 1e9])
def test_a_limit_that_is_no_number_of_seconds_is_named(wrong: object) -> None:
    with pytest.raises(ValueError, match="retry="):
        Options({"retry_seconds": wrong}).limits()


def test_options_show_only_names() -> None:
    options = Options(PLANTED)
    assert repr(options) == "Options(key, secret, client_kwargs, headers, account_key)"
    assert str(options) == repr(options)
    assert not hasattr(options, "__dict__")
    for object_ in (options, Redactor(options.secrets())):
        assert "PLANTED" not in repr(object_)
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(object_)


def test_values_are_removed_from_texts() -> None:
    redact = Redactor(Options(PLANTED | {"headers": {"X": "PLANTEDHEADER"}}).secrets())
    values = ["PLANTEDKEY", "PLANTEDSECRET", "PLANTEDTOKEN", "PLANTEDBYTES2", "PLANTEDHEADER"]
    for value in values:
        assert "PLANTED" not in redact(f"a {value}b")


@pytest.mark.parametrize(
    "text",
    [
        "https://user:SECRET@host/a",
        "https://SECRET@host/a",
        "GET https://host/b/k?X-Amz-Signature=SECRET&X-Amz-Credential=SECRET failed",
        "https://h/k?sig=SECRET",
        "Authorization: AWS4-HMAC-SHA256 SECRET",
        "'Authorization': 'Bearer SECRETSECRET'",
        "Basic SECRETSECRET==",
        "x-amz-security-token: SECRET",
        "aws_secret_access_key=SECRET",
        "aws_session_token = SECRET",
        "AccountKey=SECRET;",
        '{"account_key": "SECRET"}',
        "SharedAccessSignature=SECRET",
        "password: SECRET",
        "<AWSAccessKeyId>SECRET</AWSAccessKeyId>",
        "<SignatureProvided>SECRET</SignatureProvided>",
    ],
)
def test_secrets_of_known_forms_are_removed(text: str) -> None:
    assert "SECRET" not in Redactor()(text)


def test_other_texts_stay_as_they_are() -> None:
    text = "read failed: GET: 403 AccessDenied: Access Denied. Check the credentials: s3://b/run/a"
    assert Redactor(["x", "abc"])(text) == text


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("az://c/run", {"account_name": "a", "account_key": "PLANTEDKEY!!"}),
        ("az://c/run", {"account_name": "PLANTED NAME", "account_key": 5}),
        ("gs://b/run", {"service_account_key": '{"a":"PLANTEDKEY"'}),
        ("gs://b/run", {"application_credentials": "/none/PLANTEDPATH"}),
        ("s3://b/run", {"endpoint_url": "http://user:PLANTEDKEY@host", "key": "k"}),
        ("s3://b/run", {"endpoint_url": "http://host/?PLANTEDKEY", "key": "k"}),
        ("s3://b/run", {"endpoint_url": "PLANTED KEY", "key": "k"}),
        ("s3://b/run", {"unsigned_payload": "PLANTEDKEY", "key": "k"}),
        ("http://h/run", {"headers": {"A\n": "PLANTEDKEY"}}),
    ],
)
def test_a_setting_that_the_library_refuses_is_not_shown(url: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cannot be opened: ") as caught:
        obstore_store(url, options)
    assert "PLANTED" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def test_credentials_are_read_if_anonymous_access_is_off(tmp_path: Path) -> None:
    pytest.importorskip("boto3")
    (tmp_path / "credentials").write_text(
        "[work]\naws_access_key_id = k\naws_secret_access_key = s\n"
    )
    config = obstore_config("s3", Options({"anon": False, "profile": "work"}))
    assert config.credentials is not None
