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
from baton.deploy.jobs.client import BatchJob, JobsClient

__all__ = [
    "Answer",
    "AsyncClient",
    "AsyncStream",
    "BatchJob",
    "BatonError",
    "Client",
    "ClusterUnreachable",
    "ErrorCode",
    "Job",
    "JobsClient",
    "Message",
    "Params",
    "Prompt",
    "RequestError",
    "Stream",
]
