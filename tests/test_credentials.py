"""API keys and certificates in files: what is taken, and what is refused before a model is loaded."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from commands import Command
from serving import make_certificate
from tiermoe.errors import ConfigError
from tiermoe.serve.guards import check_certificate, read_keys

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


def written(path: Path, data: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(data)
    path.chmod(mode)
    return path


def test_keys_of_a_file(tmp_path: Path) -> None:
    file = written(tmp_path / "keys", b"# of the house\n\nfirst-key\r\n  second#key  \n#third\n")
    assert read_keys(file) == ["first-key", "second#key"]


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (b"", "has no API key; write one a line"),
        (b"# nothing but this\n\n", "has no API key"),
        (b"one\ntwo words\n", "line 2 of .* is no API key"),
        ("schlüssel\n".encode(), "line 1 of .* is no API key"),
    ],
)
def test_files_without_keys(tmp_path: Path, data: bytes, cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        read_keys(written(tmp_path / "keys", data))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602])
def test_a_file_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    file = written(tmp_path / "keys", b"secret\n", mode)
    with pytest.raises(ConfigError, match=rf"mode {mode:o}\); chmod 600 {file}"):
        read_keys(file)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder: two certificates, their keys, a key with a passphrase, and one file with the first of each."""
    folder = tmp_path_factory.mktemp("certificates")
    make_certificate(folder, "a")
    make_certificate(folder, "b")
    make_certificate(folder, "locked", "-passout", "pass:word")
    (folder / "both.pem").write_bytes((folder / "a.crt").read_bytes() + (folder / "a.key").read_bytes())
    (folder / "text").write_text("no certificate")
    return folder


@needs_openssl
def test_certificates_are_checked_with_their_keys(certificates: Path) -> None:
    check_certificate(certificates / "a.crt", certificates / "a.key")
    check_certificate(certificates / "both.pem", None)


@needs_openssl
@pytest.mark.parametrize(
    ("cert", "key", "cause"),
    [
        ("nowhere", "a.key", "cannot read the certificate .*nowhere: No such file"),
        ("a.crt", "nowhere", "cannot read the private key .*nowhere: No such file"),
        ("a.crt", "b.key", "the private key .*b.key is not that of the certificate .*a.crt"),
        ("text", "a.key", "text and .*a.key are no certificate with its private key"),
        ("a.crt", "text", "a.crt and .*text are no certificate with its private key"),
        ("a.crt", None, "a.crt is no certificate with its private key"),
        ("a.key", "a.crt", "--ssl-certfile takes a certificate, --ssl-keyfile its private key"),
        ("locked.crt", "locked.key", "locked.key has a passphrase; openssl pkey"),
    ],
)
def test_files_that_are_no_certificate(certificates: Path, cert: str, key: str | None, cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        check_certificate(certificates / cert, certificates / key if key else None)


@needs_openssl
def test_bad_files_are_named_before_a_model_is_looked_for(
    certificates: Path, tmp_path: Path, tiermoe_: Command
) -> None:
    cert, key = certificates / "a.crt", certificates / "b.key"
    assert "is not that of" in tiermoe_("serve", "nowhere", "--ssl-certfile", cert, "--ssl-keyfile", key).cause
    assert "does nothing without --ssl-certfile" in tiermoe_("serve", "nowhere", "--ssl-keyfile", key).cause
    assert "cannot read the API keys" in tiermoe_("serve", "nowhere", "--api-key-file", tmp_path / "none").cause
