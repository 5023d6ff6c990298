"""`from baton.client import Client`: what a user of a running cluster needs. The code is in `baton.deploy.client`."""

from baton.common.errors import BatonError, ErrorCode, RequestError
from baton.deploy.client import (
    Answer,
    AsyncClient,
    AsyncJob,
    AsyncStream,
    Client,
    ClusterUnreachable,
    Job,
    JobEvent,
    Message,
    Outcome,
    Params,
    Prompt,
    Stream,
    ToolCall,
)

__all__ = [
    "Answer",
    "AsyncClient",
    "AsyncJob",
    "AsyncStream",
    "BatonError",
    "Client",
    "ClusterUnreachable",
    "ErrorCode",
    "Job",
    "JobEvent",
    "Message",
    "Outcome",
    "Params",
    "Prompt",
    "RequestError",
    "Stream",
    "ToolCall",
]
