"""API keys: who may ask a gateway, under which name, and for how much.

Owns: the file of keys, which has their hashes and never a key; comparing; and what a request's owner is. Never: an
order between keys (`admission_queue`), or HTTP.

A key has 256 random bits, so one SHA-256 is enough: there is nothing to guess that a slower hash would protect. All
hashes are compared, each in constant time. A key that is taken out of the file is refused within RELOAD_S, its batches
with it; a file that cannot be read any more changes nothing, is told in the log once, and is tried again.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Protocol, final

import msgspec
import yaml
from msgspec import Meta, Struct

from baton.common.clock import Clock
from baton.common.config import MAX_PRIORITY
from baton.common.errors import ConfigError, ErrorCode, RequestError
from baton.common.log import EventLog
from baton.deploy.admission_queue import EVERYBODY, Tenant

SETTING = "gateway.api_keys_file"
RELOAD_S = 1.0
PREFIX = "sk-baton-"
NAMED = "key:"
"""How the owner begins of what was made with a key of the file: no hash begins so."""

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""A thousand keys take the compiled one 20 ms, on the loop that serves everybody; the other one half a second."""

_log = EventLog("baton.keys")

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Rate = Annotated[float, Meta(gt=0, le=1e12)]
Weight = Annotated[float, Meta(ge=1e-6, le=1e6)]
"""Less would make counters so large that a token is lost in them, and no share is fair any more."""


class ApiKey(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One entry of the file. Entries of one name are one client with several keys, as while one is exchanged for the
    next; what it may is in the first of them."""

    name: Name  # in metrics, and of whom sessions, files and batches are
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
    weight: Weight = 1.0  # its share of the cluster while others wait, too
    requests_per_minute: Rate | None = None  # at each gateway, as the next one
    tokens_per_minute: Rate | None = None  # of prompts and answers
    top_priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = -MAX_PRIORITY  # smaller is more urgent
    admin: bool = False  # an operator's: it may see what everybody does


class Keys(Protocol):
    """Who asks, and what he may."""

    def owner_of(self, authorization: str) -> str:
        """Whose sessions, files and batches a request may use, by its header. Raises RequestError UNAUTHENTICATED."""

    def is_admin(self, owner: str) -> bool:
        """He may see the whole cluster: its workers, hand-offs and traces, of all requests."""

    def tenant_of(self, owner: str) -> Tenant:
        """With whom the cluster is shared. Raises RequestError UNAUTHENTICATED when there is no such key any more."""


@final
class NoKeys:
    """An open gateway: whoever names a key has what was made with it for himself; all share as one, and may see all."""

    def owner_of(self, authorization: str) -> str:
        return hashlib.sha256(authorization.encode()).hexdigest()

    def is_admin(self, owner: str) -> bool:
        return True

    def tenant_of(self, owner: str) -> Tenant:
        return EVERYBODY


@final
class Keyring:
    """The keys of a file, as they were when it was read."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._digests = [(bytes.fromhex(key.sha256), key.name) for key in keys]
        self._tenants = {key.name: _tenant(key) for key in reversed(keys)}
        self._admins = {key.name: key.admin for key in reversed(keys)}

    def owner_of(self, authorization: str) -> str:
        kind, _, key = authorization.partition(" ")
        found = self._name_of(key.strip()) if kind.lower() == "bearer" else None
        if found is None:
            what = "this is not a key of this cluster" if authorization else "an API key is needed"
            raise RequestError(ErrorCode.UNAUTHENTICATED, f"{what}: send Authorization: Bearer <key>")
        return NAMED + found

    def is_admin(self, owner: str) -> bool:
        return owner.startswith(NAMED) and self._admins.get(owner.removeprefix(NAMED), False)

    def tenant_of(self, owner: str) -> Tenant:
        tenant = self._tenants.get(owner.removeprefix(NAMED)) if owner.startswith(NAMED) else None
        if tenant is None:
            raise RequestError(ErrorCode.UNAUTHENTICATED, "the API key that asked for this is not valid any more")
        return tenant

    def _name_of(self, key: str) -> str | None:
        digest, found = hashlib.sha256(key.encode()).digest(), None
        for one, name in self._digests:  # all of them: how long it takes says nothing
            if hmac.compare_digest(one, digest):
                found = name
        return found


@final
class KeyFile:
    """The keys of a file, read again when it has changed."""

    def __init__(self, path: Path, clock: Clock) -> None:
        """Raises ConfigError when it cannot be used."""
        self._path = path
        self._clock = clock
        self._seen = _state_of(path)
        self._looked_s = clock.now()
        self._amiss = ""  # as the log has it: why the file is not used
        self._ring = Keyring(read_keys(path))

    def owner_of(self, authorization: str) -> str:
        return self._current().owner_of(authorization)

    def is_admin(self, owner: str) -> bool:
        return self._current().is_admin(owner)

    def tenant_of(self, owner: str) -> Tenant:
        return self._current().tenant_of(owner)

    def _current(self) -> Keyring:
        now = self._clock.now()
        if now - self._looked_s >= RELOAD_S:
            self._looked_s = now
            seen = _state_of(self._path)
            if seen != self._seen:
                self._seen = seen
                self._reload()
        return self._ring

    def _reload(self) -> None:
        try:
            self._ring = Keyring(read_keys(self._path))
        except ConfigError as error:
            if isinstance(error.__cause__, OSError):  # what is amiss (a mode, descriptors) may end without a trace here
                self._seen = None
            if error.reason != self._amiss:
                _log.error("api_keys_not_reloaded", reason=error.reason, path=str(self._path))
            self._amiss = error.reason
        else:
            self._amiss = ""
            _log.info("api_keys_reloaded", path=str(self._path))


def keys_of(path: str, clock: Clock) -> Keys:
    """Of the setting. Raises ConfigError."""
    return KeyFile(Path(path), clock) if path else NoKeys()


def read_keys(path: Path) -> list[ApiKey]:
    """Raises ConfigError that says what is wrong, and never what was found: it might be a key."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError(
                errno.EINVAL, "is no file"
            )  # whoever reads a pipe waits for its writer, and everybody for him
        text = path.read_text()
    except OSError as error:
        raise ConfigError(SETTING, str(path), error.strerror or "cannot be read") from error
    except UnicodeDecodeError as error:
        raise ConfigError(SETTING, str(path), "is not valid YAML or JSON") from error
    return parse_keys(text, path)


def parse_keys(text: str, path: Path) -> list[ApiKey]:
    """Raises ConfigError, as `read_keys` does."""
    try:
        keys = msgspec.convert(yaml.load(text, LOADER), list[ApiKey])
    except msgspec.ValidationError as error:
        hint = "a list of entries, as `baton keys new` prints them"
        raise ConfigError(SETTING, str(path), f"is no list of keys: {error}", hint) from error
    except Exception as error:  # YAML's own, and whatever its scalars raise: a 99th day, an `!!int` that is none
        raise ConfigError(SETTING, str(path), "is not valid YAML or JSON") from error
    if not keys:
        raise ConfigError(SETTING, str(path), "names no key", "baton keys new --name NAME")
    return keys


def new_key(entry: ApiKey) -> tuple[str, ApiKey]:
    """(a new key, this entry with its hash)."""
    key = PREFIX + secrets.token_urlsafe(32)
    return key, msgspec.structs.replace(entry, sha256=hashlib.sha256(key.encode()).hexdigest())


def entry_line(entry: ApiKey) -> str:
    """As the file has it: a line of YAML, to be appended."""
    return f"- {msgspec.json.encode(entry).decode()}\n"


def _tenant(key: ApiKey) -> Tenant:
    return Tenant(
        name=key.name,
        weight=key.weight,
        requests_per_minute=key.requests_per_minute,
        tokens_per_minute=key.tokens_per_minute,
        top_priority=key.top_priority,
    )


def _state_of(path: Path) -> tuple[int, int, int] | None:
    """Changes when the file does; None: it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
