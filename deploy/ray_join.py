"""Connects this process to Ray: one that runs, or one that is started on this machine for a cluster of its own.

Owns: how that Ray is started, and what a person is told when it cannot be had. Never: Baton's processes on it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterable, Iterator

import ray

from baton.common import env
from baton.common.config import NODE_ADDRESS, ClusterConfig
from baton.common.errors import BatonError, ConfigError
from baton.common.model.cache import Progress
from baton.deploy.cluster_plan import PlannedSeat
from baton.transfer.mesh import try_interface

OBJECT_STORE_BYTES = 100_000_000
"""The object store is not on the token path; Ray wants at least 75 MB."""
LOCAL_NODE_ADDRESS = "127.0.0.2"
"""A local Ray's own address. Loopback, so that it survives a change of networks and most of its ports stay private;
not 127.0.0.1, which Ray replaces by the host's outward address."""
CONNECT_TIMEOUT_S = 5.0
TOKEN_HINT = "one that wants a token looks the same: RAY_AUTH_MODE=token"


class LaunchError(BatonError):
    """The cluster did not come up. The reason is that of the first process that failed."""


def connect_ray(config: ClusterConfig, address: str | None, on_progress: Progress, temp_dir: str | None) -> bool:
    """Connects to Ray, or starts one. True: it is ours to shut down. Raises LaunchError, and ConfigError where this
    machine cannot be as it shall."""
    if ray.is_initialized():
        return False
    env.prepare_ray(joins=address is not None)
    if address is not None:
        on_progress(f"connecting to Ray at {address}")
        join_ray(address, config.cluster)
        return False
    if config.bind_host != NODE_ADDRESS:  # that of a Ray of our own is a loopback address
        try_interface(config.bind_host)
    on_progress("starting Ray on this machine")
    try:
        with _callers_sigterm():
            ray.init(
                address="local",  # never one that happens to run here
                num_cpus=cpus_of_own_ray(config.prefill + config.decode, os.cpu_count() or 1),
                num_gpus=None if config.placement.gpus else 0,  # None: those that it finds
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                _node_ip_address=LOCAL_NODE_ADDRESS,
                _temp_dir=temp_dir,
                namespace=config.cluster,
                log_to_driver=False,
                logging_level="ERROR",
            )
    except Exception as error:  # plain ones are what Ray raises here
        ray.shutdown()
        raise LaunchError(f"Ray did not start on this machine: {first_line(error)}") from error
    if config.placement.gpus:
        _check_gpus(config)
    return True


def _check_gpus(config: ClusterConfig) -> None:
    """Of a Ray of our own, which nobody adds nodes to: workers would wait for ever. Raises ConfigError."""
    each, workers = config.placement.gpus, config.prefill + config.decode
    found = float(ray.cluster_resources().get("GPU", 0.0))
    if found < each * workers:
        ray.shutdown()
        reason = f"{workers} workers take {each * workers}, and Ray found {found:g} GPUs on this machine"
        raise ConfigError("placement.gpus", each, reason, "fewer workers, or --ray-address of a cluster that has them")


def cpus_of_own_ray(workers: int, cores: int) -> int:
    """What a Ray of our own says that it has. It only counts workers by them, which may be more than there are cores;
    so there is room for as many again: the extra ones of `baton upgrade`, those that `baton scale` adds."""
    return max(2 * workers, cores)


def free_cpus() -> float:
    return float(ray.available_resources().get("CPU", 0.0))


def tell_room(free: float, wanted: Iterable[PlannedSeat], on_progress: Progress) -> None:
    """`free`: what Ray had before these were asked for. Too little is not an error: Ray may be about to add nodes. But
    nobody should wait without knowing for what."""
    each = [seat.place.num_cpus for seat in wanted if seat.place.num_cpus]
    if free < sum(each):
        on_progress(f"Ray has {free:g} free CPUs; {len(each)} workers wait for {sum(each):g}")


def join_ray(address: str, namespace: str | None = None) -> None:
    _find_listener(address)
    try:
        with _callers_sigterm():
            ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:  # nobody there; another version; not an address
        if address == "auto" and isinstance(error, ConnectionError):  # Ray's words name an option that is none of ours
            hint = f"`ray start --head` starts one, --ray-address and RAY_ADDRESS name one; {TOKEN_HINT}"
            raise LaunchError(f"no Ray cluster was found from this machine: {hint}") from error
        hint = f" ({TOKEN_HINT})" if isinstance(error, ConnectionError) else ""
        raise LaunchError(f"cannot join the Ray cluster at {address}: {first_line(error)}{hint}") from error


@contextlib.contextmanager
def _callers_sigterm() -> Iterator[None]:
    """Ray takes SIGTERM for itself: as a silent exit while it starts, as a crash with a dump once it is connected. The
    caller has it back behind this, and gets one that came meanwhile. On other threads than the main one nobody can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual, told = signal.getsignal(signal.SIGTERM), False
    try:
        yield
    except SystemExit:  # Ray's answer to it
        ray.shutdown()
        told = True
    finally:
        signal.signal(signal.SIGTERM, usual or signal.SIG_DFL)
    if told:
        signal.raise_signal(signal.SIGTERM)
        raise LaunchError("told to stop while Ray was being connected")


def _find_listener(address: str) -> None:
    """Ray itself looks for more than a minute for a cluster that is not there. What is no host and port ("auto"), it
    judges at once."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise LaunchError(f"no Ray cluster at {address}: {error}") from error


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
