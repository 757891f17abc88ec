"""The soft-RoCE guest: a virtual machine that sees this machine's files, has RDMA devices, and runs one command.

``python -m tests.rdma.guest [--deadline SECONDS] -- COMMAND...`` passes on the command's output and exit status.
``nics.sh`` describes the guest's devices and addresses, ``guest_init.sh`` its files; ``tools/rdma_guest.sh`` prepares
what it boots from."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.long import LONG

ROOT = Path(__file__).resolve().parent.parent.parent
CACHE = ROOT / ".cache" / "rdma"
PREPARE = ROOT / "tools" / "rdma_guest.sh"
#: Where the guest mounts the folder it shares with the host: what a command writes there, the host can read.
SHARE = "/run/share"
#: Seconds to boot, and to end a guest that reached its own deadline.
MARGIN_S = 60.0


class NoGuest(Exception):
    """The error when this machine cannot boot the guest; the message is the reason."""


class GuestLost(Exception):
    """The guest ended, or was ended at its deadline, without an exit status; the message ends with its console."""


class Guest:
    """A guest that boots, runs a command as root in the repository, and powers off.

    ``share`` is a folder of the host that the guest mounts on ``SHARE``; it also keeps the console's log. The guest
    ends itself ``deadline_s`` seconds after its boot, and qemu ends with the thread that started it. Raises
    :class:`NoGuest` when the guest's boot files are missing."""

    def __init__(self, share: Path, deadline_s: float = 600.0) -> None:
        status = subprocess.run(["sh", PREPARE, "status"], capture_output=True, text=True, timeout=60, check=False)
        if status.returncode != 0:
            reason = status.stderr.strip().removeprefix("rdma_guest: ")
            raise NoGuest(f"{reason} (./dev test rdma prepares it where it can)")
        self.share = share
        self.deadline_s = deadline_s
        self.console = share / "console.log"

    def run(self, command: Sequence[str], sink: Callable[[bytes], None] = lambda output: None) -> int:
        """Returns the exit status of ``command``, with output to ``sink``; raises :class:`GuestLost` without one."""
        (self.share / "command").write_text(_script(command), encoding="utf-8")
        output, status = self.share / "output", self.share / "status"
        output.write_bytes(b"")
        status.unlink(missing_ok=True)
        with output.open("rb") as tail, self.console.open("wb") as console:
            # qemu, not the guest's shell, ends with this thread: setpriv's parent-death signal survives the exec. The
            # guest's clock is the wall's and its processor slow, so it gets priority over other tests where that is
            # allowed.
            qemu = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "nice", "-n", "-5", *self._qemu()],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
            )
            give_up = time.monotonic() + self.deadline_s + MARGIN_S
            try:
                while qemu.poll() is None and not status.exists() and time.monotonic() < give_up:
                    sink(tail.read())
                    time.sleep(0.05)
                if status.exists():
                    give_up = time.monotonic() + 10  # time for its power-off; nothing is lost without it
                while qemu.poll() is None and time.monotonic() < give_up:
                    time.sleep(0.02)
            finally:
                qemu.kill()
                qemu.wait()
            sink(tail.read())
        if not status.exists():
            lines = self.console.read_text(encoding="utf-8", errors="replace").splitlines()[-30:]
            raise GuestLost("\n".join([f"the guest ended without an exit status ({self.console}):", *lines]))
        return int(status.read_text(encoding="utf-8"))

    def _qemu(self) -> list[str]:
        folder = "local,security_model=none,multidevs=remap"
        # A KVM device may open and then hang, so the processor is always emulated. If it claims fast byte copies (rep
        # movsb), the guest uses them, and copies five times slower than by words.
        return [
            *("qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max,-erms,-fsrm", "-smp", "2", "-m", "2G"),
            *("-nodefaults", "-nographic", "-serial", "stdio", "-no-reboot", "-nic", "none"),
            *("-virtfs", f"{folder},path=/,mount_tag=host,readonly=on"),
            *("-virtfs", f"{folder},path={self.share},mount_tag=share"),
            *("-kernel", str(CACHE / "kernel" / "vmlinuz"), "-initrd", str(CACHE / "kernel" / "initrd")),
            "-append",
            f"console=ttyS0 quiet panic=-1 mitigations=off nokaslr audit=0 pinyon.deadline={self.deadline_s:.0f}",
        ]


def environment() -> dict[str, str]:
    """Returns the environment of a command in the guest."""
    return {
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "PATH": f"{CACHE}/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONPATH": f"{ROOT}/src:{ROOT}",
        "PINYON_RDMA_GUEST": "1",
        # pytest recompiles every file of a package with a plugin that loads itself: half a minute for Hypothesis.
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_PLUGINS": "pytest_asyncio.plugin",
        LONG: os.environ.get(LONG, ""),
    }


def _script(command: Sequence[str]) -> str:
    exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in environment().items())
    return f"""\
export {exports}
cd {shlex.quote(str(ROOT))} && sh tests/rdma/nics.sh setup || exit 125
exec {shlex.join(command)}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rdma.guest", description=__doc__.split("\n\n")[0])
    parser.add_argument("--deadline", type=float, default=600.0, metavar="SECONDS", help="default: %(default).0f")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND...")
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("no command")

    def through(output: bytes) -> None:
        sys.stdout.buffer.write(output)
        sys.stdout.buffer.flush()

    share = Path(tempfile.mkdtemp(prefix="pinyon-rdma-"))
    try:
        return Guest(share, options.deadline).run(command, through)
    except (NoGuest, GuestLost) as error:
        print(error, file=sys.stderr)
        return 125
    finally:
        shutil.rmtree(share)


if __name__ == "__main__":
    sys.exit(main())
