"""TLS: the certificate and its key, which can be reloaded while the server runs."""

from __future__ import annotations

import ssl

import structlog

from eventlm.config import ServerConfig
from eventlm.errors import UsageError

_log = structlog.get_logger("eventlm.server")


class Tls:
    """A context for `create_server`, TLS 1.2 at least. Raises UsageError for files that cannot be used."""

    def __init__(self, certificate: str, key: str) -> None:
        self._certificate = certificate
        self._key = key
        self.context = self._load(_new_context())

    @classmethod
    def of(cls, config: ServerConfig) -> Tls | None:
        """As the configuration says; None without TLS."""
        if not config.tls_cert and not config.tls_key:
            return None
        if not config.tls_key or not config.tls_cert:
            given, missing = ("--tls-cert", "--tls-key") if config.tls_cert else ("--tls-key", "--tls-cert")
            raise UsageError(f"{given} needs {missing} too")
        return cls(config.tls_cert, config.tls_key)

    def reload(self) -> bool:
        """Read the files again, for connections from now on. If they cannot be used, those before stay in force."""
        try:
            # First into an unused context: a failure half-way would leave a certificate without its key.
            self._load(_new_context())
            self._load(self.context)
        except UsageError as error:
            _log.error("the TLS certificate was not reloaded, that before stays in force", error=str(error))
            return False
        _log.info("TLS certificate reloaded", file=self._certificate)
        return True

    def _load(self, context: ssl.SSLContext) -> ssl.SSLContext:
        certificate, key = f"--tls-cert {self._certificate}", f"--tls-key {self._key}"
        for where, path in ((certificate, self._certificate), (key, self._key)):
            _check_readable(where, path)
        try:
            # A key that needs a password would ask the terminal for it.
            context.load_cert_chain(self._certificate, self._key, password=_no_password)
        except _PasswordNeededError:
            raise UsageError(f"{key}: the key is encrypted; give it without a password, readable by you only") from None
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise UsageError(f"{key}: it is not the key of the certificate of {certificate}") from error
            if not _has_certificate(self._certificate):
                raise UsageError(f"{certificate}: there is no whole certificate in PEM in it") from error
            raise UsageError(f"{key}: there is no whole private key in PEM in it") from error
        except OSError as error:
            # The file has just disappeared.
            raise UsageError(f"{certificate}, {key}: {error.strerror}") from error
        return context


def _check_readable(where: str, path: str) -> None:
    """Raise UsageError that names the file; OpenSSL's errors do not."""
    try:
        with open(path, "rb") as file:
            file.read(1)
    except OSError as error:
        raise UsageError(f"{where}: {error.strerror}") from error


def _has_certificate(path: str) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError:
        return False
    return True


def _new_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


class _PasswordNeededError(Exception):
    pass


def _no_password() -> str:
    raise _PasswordNeededError
