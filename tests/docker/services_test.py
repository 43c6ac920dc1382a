#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the jobs of docker/compose.yaml without a container engine: each service's command and environment in a process; those
of tcp in network namespaces of their own, with the names of their hosts.

usage: services_test.py shm | tcp FOLDER_OF_PROGRAMS
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.dont_write_bytecode = True
from docker_test import check_digits, expect, free_ports, run, skip, yaml_of

# The namespaces of a service of tcp: it has a network and a host name of its own. `ip` joins the
# two by a pair of interfaces.
NAMESPACES = ["unshare", "--net", "--mount", "--uts"]


def command_of(service, programs, changed):
    """(command, environment) of a service, with some words changed."""
    command = [changed.get(word, word) for word in service["command"]]
    environment = {**os.environ, **{key: str(value) for key, value in (service.get("environment") or {}).items()}}
    environment["PATH"] = f"{programs}:{os.environ['PATH']}"
    return command, environment


def run_services(job, programs, changed=None, around=lambda name: []):
    """Runs each of a job's services in a process, and checks their output."""
    (compose,) = yaml_of("docker/compose.yaml")
    services = {name: service for name, service in compose["services"].items() if service["profiles"] == [job]}
    expect(len(services) == 2, f"compose.yaml's {job} has the services {sorted(services)}")
    for program in ("weft-run", "digits"):
        if not (programs / program).exists():
            skip(f"{programs} has no {program}, which this build leaves out")
    with tempfile.TemporaryDirectory() as folder:
        processes = {}
        try:
            for name, service in services.items():
                command, environment = command_of(service, programs, changed or {})
                command += ["--checkpoint", f"{folder}/{name}.pt"]
                Path(folder, f"{name}.out").touch()
                with open(Path(folder, f"{name}.out"), "w") as output:
                    processes[name] = subprocess.Popen([*around(name), *command], env=environment, cwd=folder, stdout=output, stderr=subprocess.STDOUT,
                                                       start_new_session=True)
            deadline = time.monotonic() + 240  # a build with a sanitizer takes ten times as long
            while time.monotonic() < deadline and any(process.poll() is None for process in processes.values()):
                if any(process.poll() for process in processes.values()):  # the other one has ten seconds to notice
                    deadline = min(deadline, time.monotonic() + 10)
                running = next((process for process in processes.values() if process.poll() is None), None)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    running and running.wait(0.2)
            said = {name: Path(folder, f"{name}.out").read_text() for name in processes}
        finally:
            for process in processes.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
                process.wait()
        text = "".join(f"--- {name}: exit {processes[name].returncode}\n{output}" for name, output in said.items())
        expect(all(process.returncode == 0 for process in processes.values()), f"the services of {job} have not all trained:\n{text}")
        check_digits("\n".join(said.values()), over=job)
        print(text)


def shm():
    (port,) = free_ports(1)  # another job on this machine may use the service's own port
    run_services("shm", Path(sys.argv[2]).resolve(), {"29500": str(port)})


def tcp():
    missing = [name for name in ("unshare", "nsenter", "ip") if not shutil.which(name)]
    if missing:
        skip(f"no {', '.join(missing)}: install util-linux and iproute2 to have the services of tcp run in networks of their own")
    own = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    probe = subprocess.run(["unshare", *own, "--net", "--mount", "--uts", "sh", "-c", "hostname weft && ip link add probe0 type veth peer name probe1"],
                           capture_output=True, text=True)
    if probe.returncode != 0:
        skip(f"this user may make no networks (unshare, ip link add … type veth): {probe.stderr.strip()}")
    # Continues in a network of this test's own, which disappears when it ends.
    os.execvp("unshare", ["unshare", *own, *NAMESPACES[1:], sys.executable, __file__, "tcp_inside", sys.argv[2]])


def tcp_inside():
    (compose,) = yaml_of("docker/compose.yaml")
    names = [name for name, service in compose["services"].items() if service["profiles"] == ["tcp"]]
    with tempfile.TemporaryDirectory() as folder:
        hosts = Path(folder, "hosts")
        addresses = {name: f"10.99.0.{number}" for number, name in enumerate(names, 1)}
        hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in addresses.items()))
        run("mount", "--bind", hosts, "/etc/hosts")  # in this test's own mount namespace
        holders = {}
        try:
            for name in names:
                holders[name] = subprocess.Popen([*NAMESPACES, "sh", "-c", f"hostname {compose['services'][name]['hostname']} && echo made && exec sleep 600"],
                                                 stdout=subprocess.PIPE, text=True)
                expect(holders[name].stdout.readline() == "made\n", f"no network for {name}")
            def inside(name):
                return ["nsenter", f"--target={holders[name].pid}", "--net", "--mount", "--uts", "--"]
            first, second = (holders[name].pid for name in names)
            run(*inside(names[0]), "ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(second))
            for name in names:
                for words in (["addr", "add", f"{addresses[name]}/24", "dev", "eth0"], ["link", "set", "eth0", "up"], ["link", "set", "lo", "up"]):
                    run(*inside(name), "ip", *words)
            run_services("tcp", Path(sys.argv[2]).resolve(), around=inside)
            for name in names:  # training over the loopback would succeed too
                (link,) = json.loads(run(*inside(name), "ip", "-json", "-stats", "link", "show", "eth0"))
                expect(link["stats64"]["rx"]["bytes"] > 100_000, f"{name} has hardly received anything: {link['stats64']}")
        finally:
            for holder in holders.values():
                holder.kill()
                holder.wait()


if __name__ == "__main__":
    {"shm": shm, "tcp": tcp, "tcp_inside": tcp_inside}[sys.argv[1]]()
