"""The Python client: `from baton.client import Client, AsyncClient`. See docs/CLIENT.md.

`core` is the client, on asyncio, and `sync` the same for plain code. What they are made of: `values` (what a user
sees), `wire` (what a gateway says), `connection` (one gateway and patience with it), `streams` (an answer as it comes,
over connections that break), `jobs` (work that outlives this process).
"""

from baton.deploy.client.connection import gateway_url
from baton.deploy.client.core import AsyncClient
from baton.deploy.client.jobs import AsyncJob, JobEvent, Lines
from baton.deploy.client.streams import AsyncStream
from baton.deploy.client.sync import Client, Job, Stream
from baton.deploy.client.values import Answer, ClusterUnreachable, Message, Outcome, Params, Prompt, ToolCall
from baton.deploy.client.wire import lines_of

__all__ = [
    "Answer",
    "AsyncClient",
    "AsyncJob",
    "AsyncStream",
    "Client",
    "ClusterUnreachable",
    "Job",
    "JobEvent",
    "Lines",
    "Message",
    "Outcome",
    "Params",
    "Prompt",
    "Stream",
    "ToolCall",
    "gateway_url",
    "lines_of",
]
