#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs programs of the build in a small Linux guest with RDMA in software, to test real verbs without a NIC.

usage: guest.py --cache DIR --share DIR --task SCRIPT [--limit SECONDS] [--arguments TEXT] PROGRAM ...

QEMU emulates the machine (no KVM, no root), Debian's kernel has rdma_rxe, and an initramfs made here holds modules, tools
and the libraries that the programs need. The guest sees the share as /mnt: programs in /mnt/bin, the task in /mnt/task.sh. Ends
with the task's status, or with 77 and "SKIP: <reason>" if qemu, a tool or the kernel is not available.
"""

import argparse
import fcntl
import glob
import gzip
import lzma
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

SKIPPED = 77
MODULES = ["virtio_pci", "9p", "9pnet_virtio", "ib_uverbs", "rdma_rxe", "crc32_generic", "dummy", "veth", "sch_netem", "sch_ingress",
           "cls_matchall", "act_gact"]
TOOLS = ["ip", "rdma", "tc"]
OPTIONAL_TOOLS = ["ibv_devinfo", "ib_write_bw", "ib_send_lat", "ib_write_lat"]
FOLDERS = ["bin", "dev", "etc", "mnt", "modules", "proc", "run", "sys", "tmp", "var"]
QEMU = "qemu-system-x86_64"

INIT = """#!/bin/busybox sh
# The guest's first process: loads the modules, mounts the share, runs the task, stores its status, powers off.
export PATH=/bin
mount -t proc none /proc; mount -t sysfs none /sys; mount -t devtmpfs none /dev
mkdir -p /dev/pts /dev/shm; mount -t devpts none /dev/pts
for folder in tmp run dev/shm; do mount -t tmpfs none /$folder; done
while read -r module; do insmod /modules/$module || echo "insmod $module failed"; done < /modules/order
ulimit -l unlimited
/bin/ip link set lo up
mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=loose share /mnt
. /mnt/environment; sh /mnt/task.sh
echo $? > /mnt/status; sync
poweroff -f
"""


class Skip(Exception):
    """Something that the guest needs is missing."""


def find_tool(name):
    path = shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin:/sbin")
    if not path:
        raise Skip(f"the guest needs {name}; ./dev setup installs it")
    return path


# --- the kernel ------------------------------------------------------------------------------------------------------


def unpack_elf(image):
    """Returns the kernel inside a bzImage: unpacking it in emulation would take half of the boot."""
    formats = [
        (b"\xfd7zXZ\x00", lambda data: lzma.LZMADecompressor(lzma.FORMAT_XZ).decompress(data)),
        (b"\x28\xb5\x2f\xfd", lambda data: subprocess.run(["zstd", "-dcq"], input=data, capture_output=True).stdout),
    ]
    for magic, unpack in formats:
        at = image.find(magic)
        while at >= 0:  # the magic also occurs by chance
            try:
                elf = unpack(image[at:])
                if elf.startswith(b"\x7fELF"):
                    return elf
            except (lzma.LZMAError, OSError):
                pass
            at = image.find(magic, at + 1)
    return None


def download_kernel(cache):
    """Downloads and unpacks Debian's kernel package; it is not installed. Returns its folder."""
    listing = subprocess.run(["apt-cache", "depends", "linux-image-amd64"], capture_output=True, text=True)
    found = re.search(r"Depends: (linux-image-[^\s]+-amd64)", listing.stdout)
    if not found:
        raise Skip("apt knows no kernel package (linux-image-amd64) for the guest: run apt-get update, on Debian 12")
    name = found.group(1)
    folder = cache / name
    partial = cache / (name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    fetched = subprocess.run(
        ["apt-get", "-o", "APT::Sandbox::User=root", "download", name], cwd=partial, capture_output=True, text=True
    )
    package = next(partial.glob("*.deb"), None)
    if fetched.returncode != 0 or package is None:
        raise Skip(f"the guest's kernel cannot be downloaded: {fetched.stderr.strip().splitlines()[-1:] or name}")
    subprocess.run(["dpkg-deb", "-x", str(package), str(partial / "root")], check=True)
    package.unlink()
    image = next((partial / "root" / "boot").glob("vmlinuz-*"))
    elf = unpack_elf(image.read_bytes())
    shutil.copy(image, partial / "kernel")
    if elf:
        (partial / "kernel").write_bytes(elf)
    # of the package only the modules are needed, a tenth of it
    modules = next((partial / "root" / "lib" / "modules").iterdir())
    modules.rename(partial / "modules")
    shutil.rmtree(partial / "root")
    partial.rename(folder)
    return folder


def kernel(cache):
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ready = sorted(path for path in cache.glob("linux-image-*") if (path / "kernel").exists() and path.suffix != ".partial")
        return ready[-1] if ready else download_kernel(cache)


def modules_in_order(folder):
    """(file name, bytes) of each module, in the order of their dependencies. Modules built into the kernel are left out."""
    files = {re.sub(r"\.ko(\.xz)?$", "", path.name).replace("-", "_"): path for path in folder.rglob("*.ko*")}
    ordered = {}

    def add(name):
        path = files.get(name.replace("-", "_"))
        if path is None or path.name in ordered:
            return
        data = path.read_bytes()
        if path.suffix == ".xz":
            data = lzma.decompress(data)
        needed = re.search(rb"\x00depends=([^\x00]*)\x00", data)
        for other in (needed.group(1).decode().split(",") if needed else []):
            if other:
                add(other)
        ordered[path.name] = data

    for name in MODULES:
        add(name)
    return [(name.removesuffix(".xz"), data) for name, data in ordered.items()]


# --- the initramfs ---------------------------------------------------------------------------------------------------


class Archive:
    """A cpio archive in the form that the kernel unpacks."""

    def __init__(self):
        self.entries = {}

    def add(self, name, data=b"", mode=stat.S_IFREG | 0o755):
        for parent in list(Path(name).parents)[-2::-1]:
            self.entries.setdefault(str(parent), (b"", stat.S_IFDIR | 0o755))
        self.entries.setdefault(name, (data, mode))

    def add_file(self, path):
        """Adds a file of this machine at the same path, with the libraries that it needs."""
        name = str(path).lstrip("/")
        if name in self.entries:
            return
        self.add(name, Path(path).read_bytes())
        self.add_libraries(path)

    def add_libraries(self, path):
        listing = subprocess.run(["ldd", str(path)], capture_output=True, text=True).stdout
        for library in re.findall(r"(/[^\s]+) \(0x", listing):
            self.add(library.lstrip("/"), Path(library).read_bytes())

    def write(self, file):
        with gzip.open(file, "wb", compresslevel=1) as out:
            for number, (name, (data, mode)) in enumerate([*self.entries.items(), ("TRAILER!!!", (b"", 0))], 1):
                numbers = [number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0]
                head = b"070701" + b"".join(b"%08x" % value for value in numbers) + name.encode() + b"\0"
                out.write(head + b"\0" * (-len(head) % 4) + data + b"\0" * (-len(data) % 4))


def build_initramfs(folder, programs, file):
    archive = Archive()
    for name in FOLDERS:
        archive.add(name, mode=stat.S_IFDIR | 0o755)
    archive.add("init", INIT.encode())
    archive.add("etc/passwd", b"root:x:0:0:root:/:/bin/sh\n")
    archive.add("etc/hosts", b"127.0.0.1 localhost\n")
    busybox = find_tool("busybox")
    archive.add("bin/busybox", Path(busybox).read_bytes())
    archive.add_libraries(busybox)
    absent = [tool for tool in OPTIONAL_TOOLS if not shutil.which(tool)]
    if absent:
        print(f"guest: without {', '.join(absent)} (of perftest and ibverbs-utils), which are not on this machine", flush=True)
    for tool in TOOLS + [tool for tool in OPTIONAL_TOOLS if tool not in absent]:
        path = find_tool(tool)
        archive.add(f"bin/{tool}", Path(path).read_bytes())
        archive.add_libraries(path)
    for applet in subprocess.run([busybox, "--list"], capture_output=True, text=True).stdout.split():
        archive.add(f"bin/{applet}", b"busybox", stat.S_IFLNK | 0o777)
    # ldd does not list these: libibverbs is opened at run time, and opens its driver by name.
    drivers = glob.glob("/usr/lib/*/libibverbs/librxe-rdmav*.so")
    verbs = glob.glob("/usr/lib/*/libibverbs.so.1")
    if not drivers or not verbs:
        raise Skip("the guest needs libibverbs with the driver for rxe (ibverbs-providers); ./dev setup installs it")
    for path in [*drivers, *verbs, "/etc/libibverbs.d/rxe.driver", *glob.glob("/lib/x86_64-linux-gnu/libgcc_s.so.1")]:
        archive.add_file(path)
    for program in programs:
        archive.add_libraries(program)
    order = []
    for name, data in modules_in_order(folder / "modules"):
        archive.add(f"modules/{name}", data)
        order.append(name)
    archive.add("modules/order", "".join(name + "\n" for name in order).encode())
    archive.write(file)


# --- running ---------------------------------------------------------------------------------------------------------


def run_guest(options, folder, initramfs):
    share = Path(options.share)
    # Of the emulated CPUs this one computes rxe's checksums fastest: without PCLMULQDQ the kernel
    # uses its table-driven code.
    command = [QEMU, "-M", "q35", "-accel", "tcg,thread=multi", "-cpu", "Nehalem,-pclmulqdq", "-smp", "2", "-m", "3G"]
    command += ["-nodefaults", "-no-reboot", "-display", "none", "-serial", "stdio"]
    command += ["-kernel", folder / "kernel", "-initrd", initramfs]
    # The guest's CPUs are threads of the host, which may not run for seconds when the host is busy.
    # The guest's kernel would take that for a broken machine: no_timer_check prevents a panic at
    # the start ("IO-APIC + timer doesn't work!"), nowatchdog the report of a soft lockup ("BUG:",
    # which fails the task).
    command += ["-append", "console=ttyS0 quiet panic=-1 mitigations=off no_timer_check nowatchdog"]
    command += ["-virtfs", f"local,path={share},mount_tag=share,security_model=none,multidevs=remap"]
    try:
        subprocess.run([str(part) for part in command], stdin=subprocess.DEVNULL, timeout=options.limit)
    except subprocess.TimeoutExpired:
        print(f"guest: not finished after {options.limit} s", flush=True)
        return 1
    status = share / "status"
    if not status.exists():
        print("guest: it stopped before the end of its task", flush=True)
        return 1
    return int(status.read_text())


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--cache", required=True, type=Path)
    parser.add_argument("--share", required=True, type=Path)
    parser.add_argument("--task", required=True, type=Path)
    parser.add_argument("--limit", type=float, default=600)
    parser.add_argument("--arguments", default="", help="for the task, in /mnt/arguments")
    parser.add_argument("programs", nargs="+", type=Path)
    options = parser.parse_args()
    for tool in [QEMU, "busybox", *TOOLS]:
        find_tool(tool)
    folder = kernel(options.cache)
    shutil.rmtree(options.share, ignore_errors=True)
    (options.share / "bin").mkdir(parents=True)
    for program in options.programs:
        shutil.copy(program, options.share / "bin")
    shutil.copy(options.task, options.share / "task.sh")
    passed = [name for name in ("WEFT_ALL_SETTINGS",) if name in os.environ]
    (options.share / "environment").write_text("".join(f"export {name}={shlex.quote(os.environ[name])}\n" for name in passed))
    (options.share / "arguments").write_text(options.arguments)
    initramfs = Path(str(options.share) + ".initramfs")
    build_initramfs(folder, options.programs, initramfs)
    return run_guest(options, folder, initramfs)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Skip as skip:
        print(f"SKIP: {skip}", flush=True)
        sys.exit(SKIPPED)
