"""Credentials in files: API keys that clients may send, and the server's TLS certificate. Both are read before a model
is loaded."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from tiermoe.errors import ConfigError

_OTHERS = 0o077  # bits of a mode that let others than the owner at a file


def read_keys(path: Path) -> list[str]:
    """The API keys of a file: one a line, without empty lines and those that begin with '#'.

    ConfigError where it cannot be read, others than its owner may read or write it (not checked on Windows, which has
    no such bits), or it has no key, or one that no HTTP header can have."""
    try:
        with path.open("rb") as file:
            mode, data = os.fstat(file.fileno()).st_mode & 0o777, file.read()
    except OSError as error:
        raise ConfigError(f"cannot read the API keys in {path}: {error.strerror}") from error
    if os.name != "nt" and mode & _OTHERS:
        raise ConfigError(f"others may read or write the API keys in {path} (mode {mode:o}); chmod 600 {path}")
    keys = list[str]()
    for number, line in enumerate(data.splitlines(), 1):
        key = line.strip()
        if not key or key.startswith(b"#"):
            continue
        if not all(33 <= byte <= 126 for byte in key):
            raise ConfigError(f"line {number} of {path} is no API key: visible ASCII characters alone, without blanks")
        keys.append(key.decode())
    if not keys:
        raise ConfigError(f"{path} has no API key; write one a line, or leave --api-key-file out")
    return keys


def check_certificate(certfile: Path, keyfile: Path | None) -> None:
    """ConfigError where the files are no certificate chain and its private key, in PEM and without a passphrase.
    keyfile: None where the certificate's file has the key too."""
    for what, path in (("certificate", certfile), ("private key", keyfile)):
        if path is None:
            continue
        try:
            path.open("rb").close()
        except OSError as error:
            raise ConfigError(f"cannot read the {what} {path}: {error.strerror}") from error
    private = keyfile or certfile

    def no_passphrase() -> str:
        raise ConfigError(f"the private key {private} has a passphrase; openssl pkey -in {private} -out KEY removes it")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, no_passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"the private key {private} is not that of the certificate {certfile}") from error
        named = f"{certfile} and {keyfile} are" if keyfile is not None else f"{certfile} is"
        where = "--ssl-certfile takes a certificate, --ssl-keyfile its private key"
        raise ConfigError(f"{named} no certificate with its private key in PEM; {where}") from error
