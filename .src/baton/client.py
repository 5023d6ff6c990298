"""`from baton.client import Client`: what a user of a running cluster needs. The code is in `baton.deploy.client`."""

from baton.common.errors import BatonError, ErrorCode, RequestError
from baton.deploy.client import (
    Answer,
    AsyncClient,
    AsyncStream,
    Client,
    ClusterUnreachable,
    Job,
    Message,
    Params,
    Prompt,
    Stream,
)

__all__ = [
    "Answer",
    "AsyncClient",
    "AsyncStream",
    "BatonError",
    "Client",
    "ClusterUnreachable",
    "ErrorCode",
    "Job",
    "Message",
    "Params",
    "Prompt",
    "RequestError",
    "Stream",
]
