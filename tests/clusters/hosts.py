"""Machines of one's own on one machine: each has its own address, processes, name, home, shared memory and sshd, and
can be lost as a whole. Linux namespaces on a bridge; wants root, openssh-server, rsync and iproute2."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from baton.common.clock import MonotonicClock

SUBNET = "10.77.41"
PREFIX = "btn"
"""Of the bridge and of the hosts' ends of their cables."""
NEEDED = ("sshd", "ssh", "ssh-keygen", "rsync", "ip", "unshare", "nsenter")
COME_UP_S = 20.0

_ITS_OWN = ("--net", "--pid", "--mount", "--uts", "--fork", "--kill-child", "--mount-proc")
_BOOT = r"""
read -r go
ip link set lo up && ip address add $ADDRESS/24 dev eth0 && ip link set eth0 up
hostname $NAME
for folder in /tmp/ray /tmp/baton-0 /dev/shm /run/sshd; do
  mkdir -p $folder && mount -t tmpfs -o mode=0755 none $folder
done
chmod 700 /tmp/baton-0; chmod 1777 /dev/shm
mount --bind $HOME_DIR/passwd /etc/passwd && mount --bind $HOME_DIR/hosts /etc/hosts
exec /usr/sbin/sshd -D -e -f $HOME_DIR/sshd_config
"""


def missing() -> str:
    """What this machine lacks for it; "" when nothing."""
    lacks = [name for name in NEEDED if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    return ", ".join(lacks) if os.getuid() == 0 else "root"


class Host:
    """One machine, running from `start` to `lose`. `home` is its user's, root's, and stays."""

    def __init__(self, number: int, name: str, folder: Path) -> None:
        self.address = f"{SUBNET}.{number}"
        self.name = name
        self.home = folder / name
        self._number = number
        self._key = folder / "key"
        self._process: subprocess.Popen[bytes] | None = None
        self.home.mkdir()
        passwd = [line for line in Path("/etc/passwd").read_text().splitlines() if not line.startswith("root:")]
        self._write("passwd", f"root:x:0:0:root:{self.home}:/bin/bash", *passwd)
        self._write("hosts", "127.0.0.1 localhost", f"{self.address} {name}")
        subprocess.run(["ssh-keygen", "-q", "-N", "", "-t", "ed25519", "-f", str(self.home / "host_key")], check=True)
        self._write(
            "sshd_config", "Port 22", f"HostKey {self.home}/host_key", f"AuthorizedKeysFile {self._key}.pub",
            "PermitRootLogin yes", "StrictModes no", "UsePAM no", "PidFile none", "MaxStartups 100", "MaxSessions 100",
        )  # fmt: skip
        self._write(".profile", ". ~/.bashrc")
        self._write(".bashrc", "# of this host")

    def _write(self, name: str, *lines: str) -> None:
        (self.home / name).write_text("\n".join(lines) + "\n")

    def start(self) -> None:
        """Returns when its sshd answers."""
        settings = {**os.environ, "ADDRESS": self.address, "NAME": self.name, "HOME_DIR": str(self.home)}
        with (self.home / "sshd.log").open("ab") as log:
            self._process = subprocess.Popen(
                ["unshare", *_ITS_OWN, "sh", "-c", _BOOT],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=settings,
            )
        clock = MonotonicClock()
        deadline_s = clock.now() + COME_UP_S
        while (first := self._first_process()) is None:
            assert clock.now() < deadline_s, self.name
        cable = f"{PREFIX}{self._number}"
        _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(first))
        _ip("link", "set", cable, "master", PREFIX, "up")
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")
        self._process.stdin.close()
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection((self.address, 22), 1.0).close()
                return
            assert clock.now() < deadline_s, (self.home / "sshd.log").read_text()

    def lose(self) -> None:
        """Power cut: every process is killed, the cable is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            with contextlib.suppress(subprocess.CalledProcessError):  # the kernel was quicker
                _ip("link", "delete", f"{PREFIX}{self._number}")

    def run(self, command: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """In a login shell, over ssh."""
        ssh = ["ssh", "-i", str(self._key), "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"]
        words = [*ssh, "-o", "LogLevel=ERROR", f"root@{self.address}", f"bash --login -c {_quoted(command)}"]
        return subprocess.run(words, capture_output=True, text=True, check=False, timeout=timeout_s)

    def processes(self) -> list[str]:
        """Their command lines."""
        return self.run("ps -eo args").stdout.splitlines()[1:]

    def _first_process(self) -> int | None:
        assert self._process is not None
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0]) if children else None


@contextlib.contextmanager
def hosts(folder: Path, *names: str) -> Iterator[dict[str, Host]]:
    """That run; they and their network are gone afterwards. `folder / "key"` logs into all of them."""
    subprocess.run(["ssh-keygen", "-q", "-N", "", "-t", "ed25519", "-f", str(folder / "key")], check=True)
    _ip("link", "add", PREFIX, "type", "bridge")
    found: dict[str, Host] = {}
    try:
        _ip("address", "add", f"{SUBNET}.1/24", "dev", PREFIX)
        _ip("link", "set", PREFIX, "up")
        for number, name in enumerate(names, start=2):
            found[name] = Host(number, name, folder)
            found[name].start()
        yield found
    finally:
        for host in found.values():
            host.lose()
        _ip("link", "delete", PREFIX)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _quoted(command: str) -> str:
    return "'" + command.replace("'", "'\\''") + "'"
