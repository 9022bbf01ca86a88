"""Two machines on one: network namespaces, joined by a cable, with host names of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Machine:
    """A namespace. `device` is its end of the cable. The files in `folder` are those of /etc for names of hosts."""

    name: str
    address: str
    device: str
    folder: Path

    def command(self, *words: str | Path) -> list[str]:
        """What runs a command on this machine."""
        files = " && ".join(f'mount --bind "$1/{name}" /etc/{name}' for name in ("hosts", "nsswitch.conf"))
        script = f'hostname "$0" && {files} && shift && exec "$@"'
        renamed = ["unshare", "--uts", "--mount", "sh", "-c", script, self.name, str(self.folder)]
        return ["ip", "netns", "exec", self.name, *renamed, *map(str, words)]


class NoMachines(RuntimeError):
    """This environment cannot make network namespaces."""


@contextmanager
def two_machines(folder: Path) -> Iterator[tuple[Machine, Machine]]:
    """They find each other through files in `folder`. Raises `NoMachines` with the reason if there can be none."""
    if missing := [tool for tool in ("ip", "unshare", "hostname", "mount") if shutil.which(tool) is None]:
        raise NoMachines(f"there is no {missing[0]}")
    pid = os.getpid()
    pair = tuple(Machine(f"ht{pid}-{n}", f"10.213.{pid % 256}.{n + 1}", f"ht{pid}{'ab'[n]}", folder) for n in range(2))
    (folder / "nsswitch.conf").write_text("hosts: files\n")  # nobody is asked for a name, and waited for
    (folder / "hosts").write_text("".join(f"{machine.address} {machine.name}\n" for machine in pair))
    made: list[Machine] = []
    try:
        for machine in pair:
            _run("ip", "netns", "add", machine.name)
            made.append(machine)
        first, second = pair
        cable = ["type", "veth", "peer", "name", second.device, "netns", second.name]
        _run("ip", "link", "add", first.device, "netns", first.name, *cable)
        for machine in pair:
            inside = ["ip", "-n", machine.name]
            _run(*inside, "address", "add", f"{machine.address}/24", "dev", machine.device)
            for device in ("lo", machine.device):
                _run(*inside, "link", "set", device, "up")
        _run(*first.command("true"))
        yield first, second
    finally:
        for machine in made:
            subprocess.run(["ip", "netns", "del", machine.name], check=False, capture_output=True)


def _run(*command: str) -> Sequence[str]:
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise NoMachines(f"{' '.join(command)}: {ran.stderr.strip()}")
    return ran.stdout.splitlines()
