#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks docker/, .github/ and profiling/nsight without a container engine; with buildah and a base image, builds the images and
runs the programs in them.

usage: docker_test.py files | yaml | image | gpu_image | base_image
       docker_test.py slurm FOLDER_OF_PROGRAMS

image: builds docker/cpu.Dockerfile. WEFT_TEST_IMAGE_BASE names the base image in buildah's storage (tests/docker/base_image.sh makes one);
WEFT_TEST_APT_CONF and WEFT_TEST_PIP_CONF, if set, name files with settings of apt and pip for the build, WEFT_TEST_JOBS
sets its number of jobs. It takes as long as building Weft. With WEFT_TEST_IMAGE nothing is built: it names an image that was made
from that file, as buildah finds it (docker-archive:weft-cpu.tar, written by docker save -o).

gpu_image: builds docker/gpu.Dockerfile on that base instead of its vendor's. WEFT_TEST_GPU_STAGES names the stages: runtime (the
programs with CUDA, and the image that holds them), test (all GPU tests and benches), or "runtime test". Each compiles Weft anew.

slurm: submits docker/slurm.sh with the digits to Slurm daemons that it starts and ends, if they are installed.
"""

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "dev"))
import dev_package

BUILDAH = ["buildah", "--storage-driver", "vfs"]


def fail(text):
    sys.exit(f"docker_test: {text}")


def skip(reason):
    print(f"SKIP: {reason}")
    sys.exit(77)


def run(*command, **options):
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    if result.returncode != 0:
        fail(f"{' '.join(str(part) for part in command[:5])} …: exit {result.returncode}\n{result.stdout[-4000:]}{result.stderr[-4000:]}")
    return result.stdout


class Parsed(Exception):
    """./dev has understood its arguments and would begin its work."""


def why_not_understood(words):
    """Returns what ./dev says against its arguments, or None if it understands them; runs no command."""
    dev = dev_package.load()
    said = io.StringIO()
    with contextlib.ExitStack() as stack:
        for name in ("parse_args", "parse_intermixed_args"):
            parse = getattr(argparse.ArgumentParser, name)

            def parse_and_stop(parser, *arguments, parse=parse):
                parse(parser, *arguments)
                raise Parsed

            stack.enter_context(mock.patch.object(argparse.ArgumentParser, name, parse_and_stop))
        for name in ("build", "setup", "lock", "run"):  # the first steps of commands that hand their arguments on
            stack.enter_context(mock.patch.object(dev, name, side_effect=Parsed))
        stack.enter_context(mock.patch.object(sys, "argv", ["dev", *words]))
        stack.enter_context(contextlib.redirect_stderr(said))
        try:
            dev.main()
        except Parsed:
            return None
        except SystemExit:
            return said.getvalue()
        except dev.Stop as stop:
            return str(stop)
    return f"it did nothing: {said.getvalue()}"


def dev_commands(text):
    """The arguments of each ./dev in a script or a Dockerfile."""
    text = re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    text = re.sub(r"\$\{\w+:\+((?:[^{}]|\$\{\w+\})*)\}", r"\1", text)  # ${JOBS:+--jobs ${JOBS}}
    text = re.sub(r"\$\{\{.*?\}\}|\$\{?\w+\}?", "1", text)
    for line in text.splitlines():
        if array := re.search(r'\["\./dev", .*\]', line):
            yield json.loads(array.group(0))[1:]
        for command in re.split(r"&&|\|\||;", line):
            words = shlex.split(command) if "./dev" in command and '"./dev"' not in command else []
            if "./dev" in words:
                yield words[words.index("./dev") + 1 :]


def check_dev_commands():
    """Checks that ./dev understands every command in docker/, with its options."""
    named = 0
    for file in sorted((ROOT / "docker").iterdir()):
        for words in dev_commands(file.read_text()):
            named += 1
            if (why := why_not_understood(words)) is not None:
                fail(f"{file.relative_to(ROOT)} runs './dev {' '.join(words)}': {why}")
    if named < 7:
        fail(f"only {named} uses of ./dev were found in docker/")
    for wrong in ("build --presets cpu", "test --preset gpu", "fly", "gpu --prepare extra"):  # shows that this test can fail
        if why_not_understood(wrong.split()) is None:
            fail(f"'./dev {wrong}' was accepted")


def check_gpu_preset():
    """Checks that the GPU benches are built with a preset that records ranges: one of them reads its figure from ranges."""
    presets = {one["name"]: one for one in json.loads((ROOT / "CMakePresets.json").read_text())["configurePresets"]}
    commands = [words for words in dev_commands((ROOT / "docker/gpu.Dockerfile").read_text()) if words[0] == "gpu"]
    if len(commands) != 2:
        fail(f"docker/gpu.Dockerfile runs ./dev gpu {len(commands)} times, not once to prepare and once to run")
    used = {words[words.index("--preset") + 1] if "--preset" in words else "optimized" for words in commands}
    if len(used) != 1:
        fail(f"docker/gpu.Dockerfile prepares one preset and runs another: {sorted(used)}")
    place = used.pop()
    preset = presets[place]
    while "WEFT_TRACE" not in preset.get("cacheVariables", {}) and "inherits" in preset:
        preset = presets[preset["inherits"]]
    if preset.get("cacheVariables", {}).get("WEFT_TRACE", "AUTO") == "OFF":
        fail(f"docker/gpu.Dockerfile runs the GPU benches of the preset {place}, which has WEFT_TRACE=OFF: 'exposed communication' reads ranges")


STAGES = {"cpu": ["build", "test", "gather", "runtime"], "gpu": ["source", "test", "gather", "runtime"]}


def check_dockerfiles():
    for name, wanted in STAGES.items():
        text = (ROOT / "docker" / f"{name}.Dockerfile").read_text()
        stages = re.findall(r"^FROM \S+ AS (\w+)$", text, re.MULTILINE)
        if stages != wanted:
            fail(f"docker/{name}.Dockerfile has the stages {stages}")
        runtime = text[text.index("AS runtime") :]
        if "\nUSER weft\n" not in runtime:
            fail(f"docker/{name}.Dockerfile: the runtime stage runs as root")
        installed = re.findall(r"install --no-install-recommends (.+?) &&", runtime)
        if [line.split() for line in installed] != [["libibverbs1", "ibverbs-providers"]]:
            fail(f"docker/{name}.Dockerfile: the runtime stage installs {installed}, not what RDMA needs and no more")
        for copied in re.findall(r"^COPY --from=(\w+) ", runtime, re.MULTILINE):
            if copied not in wanted[:-1]:
                fail(f"docker/{name}.Dockerfile copies from {copied}")
        if re.search(r"https?://|index-url|sources\.list", text):
            fail(f"docker/{name}.Dockerfile names a package host, which only the builder may choose")
        for copied in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE):
            for source in copied.split()[:-1]:
                if not (ROOT / source).exists():
                    fail(f"docker/{name}.Dockerfile copies {source}, which does not exist")


def check_scripts():
    for script in ["docker/slurm.sh", "profiling/nsight/nsys.sh", "profiling/nsight/ncu.sh", "tests/docker/base_image.sh"]:
        run("bash", "-n", ROOT / script)
        unasked = subprocess.run(["bash", ROOT / script], capture_output=True, text=True)
        if unasked.returncode != 2 or "usage" not in unasked.stderr:
            fail(f"{script} without arguments: exit {unasked.returncode}, {unasked.stderr}")


def check_dashboard():
    """Checks that the dashboard asks for existing metrics only."""
    served = (ROOT / "engine/instruments/metrics.cc").read_text()
    made = set(re.findall(r'"(weft_\w+)"', served))
    made |= {f"{name}_{part}" for name in set(made) for part in ("bucket", "count", "sum")}
    dashboard = (ROOT / "profiling/grafana/weft.json").read_text()
    asked = set(re.findall(r"\bweft_\w+", dashboard))
    if not asked or asked - made:
        fail(f"profiling/grafana/weft.json asks for {sorted(asked - made) or 'nothing'}")
    if not json.loads(dashboard)["panels"]:
        fail("profiling/grafana/weft.json has no panels")


def expect(condition, text):
    if not condition:
        fail(text)


def yaml_of(path):
    """The documents of a YAML file."""
    try:
        import yaml
    except ImportError:
        skip("no PyYAML in this Python: ./dev setup installs it in the venv that ./dev test runs with")
    return list(yaml.safe_load_all((ROOT / path).read_text()))


def option(command, name):
    return command[command.index(name) + 1]


def check_compose(compose):
    """Checks that each job's services are the two machines of one job, and that those with GPUs have what GPUs need."""
    services = dict(compose["services"])
    expect(set(services) == {"tcp-0", "tcp-1", "shm-0", "shm-1", "gpu", "gpu-rdma"}, f"compose.yaml has the services {sorted(services)}")
    check_compose_with_gpus(services.pop("gpu"), services.pop("gpu-rdma"))
    for name, service in services.items():
        job, rank = name.split("-")
        command = service["command"]
        expect(service["profiles"] == [job], f"{name} has the profiles {service['profiles']}")
        expect(command[0] == "weft-run" and "digits" in command, f"{name} runs {command}")
        expect(all(isinstance(word, str) for word in command), f"{name}: a word of {command} is no string")
        expect(option(command, "--nnodes") == "2" and option(command, "--node-rank") == rank, f"{name}: {command} is not machine {rank} of 2")
        expect(option(command, "--backend") == job, f"{name} trains over {option(command, '--backend')}")
        first = services[f"{job}-0"]
        expect(option(command, "--master-port") == option(first["command"], "--master-port"), f"{name} looks for the store at another port")
        expect(service["build"] == {"context": "..", "dockerfile": "docker/cpu.Dockerfile"} and service["image"] == "weft-cpu", f"{name}: {service}")
        expect(service["ulimits"] == {"memlock": -1} and service["init"] is (job == "tcp"), f"{name}: {service}")
        for variable in service.get("environment", {}):
            expect(f"`{variable}`" in (ROOT / "docs/environment.md").read_text(), f"{name} sets {variable}, which docs/environment.md does not list")
        expect(rank == "0" or service["depends_on"] == [f"{job}-0"], f"{name} does not depend on {job}-0")
        if job == "tcp":
            expect(service["hostname"] == name and option(command, "--master-addr") == "tcp-0", f"{name}: {service}")
            expect("network_mode" not in service and "pid" not in service, f"{name} shares namespaces, so it need not go over TCP")
        else:
            expect(option(command, "--master-addr") == "127.0.0.1", f"{name}: {command}")
            # In the other service's PID namespace it would be killed if that service ends first.
            expect(service["pid"] == "host" and (rank == "0" or service["network_mode"] == "service:shm-0"), f"{name}: {service}")


def check_compose_with_gpus(alone, with_rdma):
    """Checks the services on all GPUs of a machine; the one with RDMA is one machine of several and otherwise the same."""
    for service in (alone, with_rdma):
        command = service["command"]
        expect(all(isinstance(word, str) for word in command), f"compose.yaml: a word of {command} is no string")
        expect(command[0] == "weft-run" and option(command, "--nproc-per-node") == "gpu" and "digits" in command, f"compose.yaml: gpu runs {command}")
        expect(service["image"] == "weft-gpu" and service["build"] == {"context": "..", "dockerfile": "docker/gpu.Dockerfile"}, f"compose.yaml: {service}")
        (devices,) = service["deploy"]["resources"]["reservations"]["devices"]
        expect(devices == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}, f"compose.yaml: a service with GPUs reserves {devices}")
        expect(service["ipc"] in ("shareable", "host") and service["shm_size"] == "1gb", f"compose.yaml: NCCL's /dev/shm: {service}")
        expect(service["ulimits"]["memlock"] == -1 and service["ulimits"]["stack"] == 64 << 20 and service["init"] is True, f"compose.yaml: {service}")
    expect(alone["profiles"] == ["gpu"] and with_rdma["profiles"] == ["gpu-rdma"], f"compose.yaml: {alone['profiles']}, {with_rdma['profiles']}")
    expect("devices" not in alone, "compose.yaml: gpu does not start on a machine without those devices")
    expect(with_rdma["devices"] == ["/dev/infiniband"] and with_rdma["cap_add"] == ["IPC_LOCK"], f"compose.yaml: RDMA's devices: {with_rdma}")
    expect(with_rdma["network_mode"] == "host", "compose.yaml: a RoCE port's addresses are of the host's network")
    command = with_rdma["command"]
    for name, variable in (("--nnodes", "NNODES"), ("--node-rank", "NODE_RANK"), ("--master-addr", "MASTER_ADDR")):
        expect(option(command, name).startswith(f"${{{variable}:-"), f"compose.yaml: {name} is {option(command, name)}, which no machine can set")


def check_kubernetes(documents):
    """Checks that the Job sets the variables of env:// from the pods' index, and that the Service makes the first pod's name known."""
    expect([document["kind"] for document in documents] == ["Service", "Job"], f"kubernetes.yaml has {[one['kind'] for one in documents]}")
    service, job = documents
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    variables = {one["name"]: one for one in container["env"]}
    name, ranks = job["metadata"]["name"], spec["completions"]
    expect(spec["completionMode"] == "Indexed" and spec["parallelism"] == ranks, f"kubernetes.yaml: {ranks} pods do not all run at once, by index")
    expect(spec["backoffLimit"] == 0 and pod["restartPolicy"] == "Never", "kubernetes.yaml: pods are started again, which a job that lost one does not survive")
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    expect(variables["RANK"].get("valueFrom") == {"fieldRef": {"fieldPath": index}}, f"kubernetes.yaml: RANK is {variables['RANK']}")
    values = {key: one.get("value") for key, one in variables.items()}
    expect(all(value is None or isinstance(value, str) for value in values.values()), f"kubernetes.yaml: a value is no string: {values}")
    expect(values["WORLD_SIZE"] == str(ranks), f"kubernetes.yaml: {ranks} pods, and WORLD_SIZE {values['WORLD_SIZE']}")
    expect(values["LOCAL_RANK"] == "0", f"kubernetes.yaml: a pod has one rank, and LOCAL_RANK is {values['LOCAL_RANK']}")
    expect(values["MASTER_ADDR"] == f"{name}-0.{pod['subdomain']}", f"kubernetes.yaml: the first pod is {name}-0, and MASTER_ADDR {values['MASTER_ADDR']}")
    expect(service["metadata"]["name"] == pod["subdomain"] and service["spec"]["clusterIP"] in (None, "None"), "kubernetes.yaml: no headless Service of the pods")
    expect(service["spec"]["selector"] == {"job-name": name} and service["spec"]["publishNotReadyAddresses"], "kubernetes.yaml: the Service finds no pods of the Job")
    expect(values["MASTER_PORT"] == str(service["spec"]["ports"][0]["port"]), f"kubernetes.yaml: MASTER_PORT is {values['MASTER_PORT']}")
    expect(":" in container["image"] or container.get("imagePullPolicy") == "IfNotPresent", "kubernetes.yaml: an image without a tag is pulled every time")
    expect(pod["securityContext"]["runAsNonRoot"] is True, "kubernetes.yaml: the pods may run as root")
    user = re.search(r"useradd .*--uid (\d+)", (ROOT / "docker/cpu.Dockerfile").read_text()).group(1)
    expect(str(pod["securityContext"]["runAsUser"]) == user, f"kubernetes.yaml: the image's user is {user}")
    known = {key for key in values if not key.startswith("WEFT_")}
    expect(known == {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}, f"kubernetes.yaml sets {sorted(known)}")


def stages_built(job):
    """(Dockerfile, stage) of each `docker build` in a job; the last stage if none is named."""
    builds = re.findall(r"docker build -f docker/(\w+)\.Dockerfile( .*)?$", "\n".join(step.get("run", "").strip() for step in job["steps"]), re.MULTILINE)
    return [(name, re.search(r"--target (\w+)|$", rest).group(1) or STAGES[name][-1]) for name, rest in builds]


def check_workflow(workflow):
    """Checks that every job has a time limit, and that ./dev understands each command in it, for every value of the matrix."""
    jobs = workflow["jobs"]
    expect(set(jobs) == {"cpu", "wheel", "nightly", "format", "lint", "fuzz", "image", "gpu"}, f"ci.yaml has the jobs {sorted(jobs)}")
    named = 0
    for name, job in jobs.items():
        expect(0 < job.get("timeout-minutes", 0) <= 360, f"ci.yaml: {name} has no timeout-minutes")
        matrices = job.get("strategy", {}).get("matrix", {})
        expect(set(matrices) <= {"preset"}, f"ci.yaml: {name} has the matrix {matrices}, which this test does not know")
        for preset in matrices.get("preset", [""]):
            for step in job["steps"]:
                expect(("uses" in step) != ("run" in step), f"ci.yaml: a step of {name} that neither uses nor runs: {step}")
                for words in dev_commands(re.sub(r"\$\{\{ matrix\.preset \}\}", preset, step.get("run", ""))):
                    named += 1
                    if (why := why_not_understood(words)) is not None:
                        fail(f"ci.yaml: {name} runs './dev {' '.join(words)}': {why}")
        for dockerfile in re.findall(r"-f (\S+)", " ".join(step.get("run", "") for step in job["steps"])):
            expect((ROOT / dockerfile).exists(), f"ci.yaml: {name} uses {dockerfile}, which does not exist")
    expect(named >= 4, f"ci.yaml: only {named} uses of ./dev were found")
    expect(stages_built(jobs["image"]) == [("cpu", "runtime"), ("cpu", "test")], f"ci.yaml: image builds {stages_built(jobs['image'])}")
    expect(stages_built(jobs["gpu"]) == [("gpu", "test"), ("gpu", "runtime")], f"ci.yaml: gpu builds {stages_built(jobs['gpu'])}")
    looks = [step["run"] for step in jobs["image"]["steps"] if "docker_test.py image" in step.get("run", "")]
    expect(len(looks) == 1 and "docker-archive:$RUNNER_TEMP/weft-cpu.tar" in looks[0], f"ci.yaml: the image is not tested: {looks}")
    expect("gpu" in jobs["gpu"]["runs-on"] and "self-hosted" in jobs["gpu"]["runs-on"], f"ci.yaml: gpu runs on {jobs['gpu']['runs-on']}")
    expect(all(isinstance(jobs[name]["runs-on"], str) for name in set(jobs) - {"gpu"}), "ci.yaml: a job other than the GPU's needs a self-hosted machine")


def yaml():
    (compose,) = yaml_of("docker/compose.yaml")
    check_compose(compose)
    check_kubernetes(yaml_of("docker/kubernetes.yaml"))
    files = [file.relative_to(ROOT) for folder in ("docker", ".github") for end in ("yaml", "yml") for file in (ROOT / folder).rglob(f"*.{end}")]
    for file in files:
        yaml_of(file)
    expect(len(files) == 3, f"there are {len(files)} YAML files, of which this test knows 3")
    (workflow,) = yaml_of(".github/workflows/ci.yaml")
    check_workflow(workflow)


def fails(check, *arguments):
    """Returns whether a check of this file fails; does not print its message."""
    try:
        check(*arguments)
    except SystemExit:
        return True
    return False


def check_the_check_of_transports():
    """Checks that check_transports refuses an image without RDMA's library and accepts one without a device (the texts are weft-info's)."""
    shm = "shm        usable: host memory; connections: preference 100, inline up to 65536 bytes\n"
    for said, wrong in (("libibverbs finds no RDMA devices (are there any, and is the kernel module ib_uverbs loaded?): Function not implemented", False),
                        ("no RDMA port can be used: this machine has no RDMA device (or its kernel modules are not loaded: ib_uverbs)", False),
                        ("libibverbs cannot be opened: libibverbs.so.1: cannot open shared object file; install rdma-core", True)):
        if fails(check_transports, f"{shm}verbs      not usable: {said}\n") != wrong:
            fail(f"check_transports takes '{said}' for {'right' if wrong else 'wrong'}")
    if not fails(check_transports, shm):
        fail("check_transports wants no verbs")


def files():
    check_dev_commands()
    check_the_check_of_transports()
    check_gpu_preset()
    check_dockerfiles()
    check_scripts()
    check_dashboard()


def base_of_images(what):
    base = os.environ.get("WEFT_TEST_IMAGE_BASE")
    if not shutil.which("buildah"):
        skip(f"no buildah: install it (./dev setup --tests) to have {what} built")
    if not base:
        skip(f"WEFT_TEST_IMAGE_BASE names no base image (tests/docker/base_image.sh makes one) to build {what} on")
    return base


def build_image(dockerfile, target, base, tag):
    secrets = []
    for name, variable in (("apt", "WEFT_TEST_APT_CONF"), ("pip", "WEFT_TEST_PIP_CONF")):
        if os.environ.get(variable):
            secrets += ["--secret", f"id={name},src={os.environ[variable]}"]
    arguments = ["--build-arg", f"BASE={base}", "--build-arg", f"JOBS={os.environ.get('WEFT_TEST_JOBS', '')}"]
    command = [*BUILDAH, "bud", "--isolation", "chroot", "--network", "host", *arguments, *secrets]
    run(*command, "-f", ROOT / "docker" / dockerfile, "--target", target, "-t", tag, ROOT)


@contextlib.contextmanager
def container_of(image):
    """Gives a function that runs a command in a container of an image, as the image's user and with its environment."""
    container = run(*BUILDAH, "from", image).strip()
    try:
        yield lambda *command: run(*BUILDAH, "run", "--isolation", "chroot", container, "--", *command)
    finally:
        run(*BUILDAH, "rm", container)


def check_digits(said, ranks=2, over=None):
    """Checks in the output of examples/digits after an epoch that this many ranks have trained one model."""
    begun = re.search(r"(\d+) training and \d+ test images .*, (\d+) ranks on \S+ \((\w+)\)", said)
    expect(begun and int(begun.group(2)) == ranks and int(begun.group(1)) > 1000, f"no job of {ranks} ranks:\n{said}")
    expect(over is None or begun.group(3) == over, f"a job over {begun.group(3)}, not {over}:\n{said}")
    epoch = re.search(r"epoch +1/1 +loss ([0-9.]+) +accuracy ([0-9.]+)", said)
    tested = re.search(r"test accuracy +([0-9.]+)", said)
    expect(epoch and tested, f"no epoch was trained and tested:\n{said}")
    # Guessing among ten digits has a loss of ln 10 and an accuracy of 0.1.
    expect(0 < float(epoch.group(1)) < 2.3026, f"a loss of {epoch.group(1)} after an epoch: it has not learned\n{said}")
    expect(0.11 < float(tested.group(1)) <= 1, f"a test accuracy of {tested.group(1)}: it has not learned\n{said}")
    models = re.findall(r"parameters, rank \d+ +([0-9a-f]{16})", said)
    expect(len(models) == ranks and len(set(models)) == 1, f"the ranks do not have the same model:\n{said}")


def check_transports(said):
    """Checks in the output of weft-info that an image has everything that verbs needs, except for a device."""
    expect(re.search(r"^shm +usable: ", said, re.MULTILINE), f"weft-info does not find shm usable:\n{said}")
    expect(re.search(r"^verbs +(usable: |not usable: .*\bno RDMA )", said, re.MULTILINE), f"weft-info finds that verbs lacks more than a device:\n{said}")


NOT_IN_AN_IMAGE = ["gcc", "g++", "cc", "clang", "cmake", "ninja", "make", "nvcc", "python", "python3", "pip", "pip3", "git"]


def check_runtime(inside, libraries):
    """Checks that a container of a runtime image holds what training needs, and no more."""
    user = inside("id", "-u").strip()
    expect(user == "10001", f"the image runs as user {user}")
    script = "; ".join(f"command -v {name}" for name in NOT_IN_AN_IMAGE)
    found = inside("sh", "-c", f"{script}; true").split()
    expect(not found, f"the image holds {', '.join(found)}")
    held = inside("sh", "-c", "ls /opt/weft/bin /opt/weft/lib; find / -xdev -name '*.h' -path '*torch*' 2>/dev/null | head -n 3").split()
    missing = {"digits", "weft-run", "weft-agent", "weft-info", "weft-debug", "weft-timeline", *libraries} - set(held)
    expect(not missing, f"/opt/weft lacks {sorted(missing)}")
    expect(not [one for one in held if one.endswith(".h")], f"the image holds headers: {held[-3:]}")
    size = inside("sh", "-c", "du -sxm / 2>/dev/null | cut -f1; du -sm /opt/weft | cut -f1").split()
    print(f"docker_test: {size[0]} MB in all, {size[1]} MB of them in /opt/weft")
    check_transports(inside("weft-info"))
    drivers = inside("sh", "-c", "ls /usr/lib/*/libibverbs /etc/libibverbs.d").split()
    expect(any("mlx5" in one and ".so" in one for one in drivers) and "mlx5.driver" in drivers, f"the image's drivers for RDMA: {drivers}")
    said = inside("weft-run", "--nproc-per-node", "2", "digits", "--epochs", "1", "--checkpoint", "/tmp/digits.pt")
    print(said)
    check_digits(said)


def image():
    built = os.environ.get("WEFT_TEST_IMAGE")
    if not built:
        built = "weft-cpu-test"
        build_image("cpu.Dockerfile", "runtime", base_of_images("docker/cpu.Dockerfile"), built)
    with container_of(built) as inside:
        check_runtime(inside, ["libtorch_cpu.so", "libc10.so"])


def gpu_image():
    base = base_of_images("docker/gpu.Dockerfile")
    stages = os.environ.get("WEFT_TEST_GPU_STAGES", "").split()
    if not stages:
        skip("WEFT_TEST_GPU_STAGES names no stages ('runtime', 'test' or both) of docker/gpu.Dockerfile to build: each compiles Weft with CUDA")
    unknown = set(stages) - {"runtime", "test"}
    expect(not unknown, f"WEFT_TEST_GPU_STAGES names {sorted(unknown)}; it takes runtime and test")
    for stage in stages:
        build_image("gpu.Dockerfile", stage, base, f"weft-gpu-{stage}-test")
        with container_of(f"weft-gpu-{stage}-test") as inside:
            if stage == "runtime":  # without a GPU it trains like the other image
                check_runtime(inside, ["libtorch_cpu.so", "libtorch_cuda.so", "libc10_cuda.so", "libnccl.so.2", "libcudnn_cnn.so.9", "libnvrtc.so.13"])
                continue
            # All is built and installed; only a GPU is missing.
            said = inside("sh", "-c", "./dev gpu --preset profile --cuda pip 2>&1; echo ended with $?")
            expect("no GPU here" in said and "ended with 1" in said, f"./dev gpu in the image said:\n{said}")
            inside("sh", "-c", "ls build/profile/tests/cuda_kernels_gpu_test build/profile/bin/gpu_bench build/venv/lib/python3*/site-packages/nvidia/cu13/bin/compute-sanitizer")


def base_image():
    """Checks with stand-ins that tests/docker/base_image.sh gives debootstrap and buildah the right arguments."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stand_in = '#!/bin/bash\necho "$(basename "$0") $*" >> "$CALLS"\n'
        (folder / "debootstrap").write_text(stand_in + '[ "$4" != bad ] || exit 5\nmkdir -p "$3/etc" "$3/dev" && echo 12 > "$3/etc/debian_version" && touch "$3/dev/x"\n')
        (folder / "buildah").write_text(stand_in + '[ "$3" = from ] && echo working-container\n[ "$3" != add ] || tar -tf "$5" >> "$CALLS"\n')
        for program in ("debootstrap", "buildah"):
            (folder / program).chmod(0o755)
        environment = dict(os.environ, PATH=f"{name}:{os.environ['PATH']}", CALLS=str(folder / "calls"), TMPDIR=name)
        script = Path(__file__).with_name("base_image.sh")
        said = run(script, "file:///mirror", "some-base", env=environment)
        calls = (folder / "calls").read_text()
        expect("made localhost/some-base" in said, said)
        expect(re.search(r"^debootstrap --variant=minbase bookworm \S+/root file:///mirror$", calls, re.MULTILINE), calls)
        expect("\n./etc/debian_version\n" in calls and "./dev/x" not in calls, f"the archive holds:\n{calls}")
        expect("buildah --storage-driver vfs commit working-container some-base\nbuildah --storage-driver vfs rm working-container\n" in calls, calls)
        refused = subprocess.run([script, "bad"], env=environment, capture_output=True, text=True)
        expect(refused.returncode == 5, f"debootstrap failed, but the script ended with {refused.returncode}")
        left = [path.name for path in folder.iterdir() if path.is_dir()]
        expect(not left, f"the script left {left}")


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@contextlib.contextmanager
def own_slurm(folder):
    """Runs Slurm's daemons for this host only, in a folder; yields the environment in which sbatch finds them."""
    host = socket.gethostname().split(".")[0]
    control, node = free_ports(2)
    key = folder / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    configuration = folder / "slurm.conf"
    configuration.write_text(f"""ClusterName=weft
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmdPort={node}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=test Nodes=ALL Default=YES State=UP MaxTime=INFINITE
""")
    environment = dict(os.environ, SLURM_CONF=str(configuration))
    munge = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.sock",
             f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/seed", f"--log-file={folder}/munged.log"]
    daemons = []
    try:
        for command in (munge, ["slurmctld", "-D"], ["slurmd", "-D"]):
            daemons.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        deadline = time.monotonic() + 60
        while "idle" not in subprocess.run(["sinfo", "--noheader"], env=environment, capture_output=True, text=True).stdout:
            logs = "".join(log.read_text(errors="replace")[-1500:] for log in folder.glob("*.log"))
            if any(daemon.poll() is not None for daemon in daemons):
                fail(f"a daemon of Slurm has ended:\n{logs}")
            if time.monotonic() > deadline:
                fail(f"Slurm has no idle node after a minute:\n{logs}")
            time.sleep(0.2)
        yield environment
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def slurm():
    missing = [name for name in ("munged", "slurmctld", "slurmd", "sbatch", "srun") if not shutil.which(name)]
    if missing:
        skip(f"no {', '.join(missing)}: install slurm-wlm and munge to have docker/slurm.sh submitted")
    if os.geteuid() != 0:
        skip("Slurm's daemons run as root, which this is not")
    with tempfile.TemporaryDirectory() as name, own_slurm(Path(name)) as environment:
        command = ["sbatch", "--wait", "--nodes=1", "--ntasks-per-node=2", f"--output={name}/out", ROOT / "docker" / "slurm.sh"]
        run(*command, Path(sys.argv[2]).resolve() / "digits", "--epochs", "1", "--checkpoint", f"{name}/digits.pt", cwd=name, env=environment)
        check_digits(Path(name, "out").read_text())
        one_fails = ["bash", "-c", "[ $SLURM_PROCID = 0 ] && exec sleep 300; exit 3"]
        try:
            failed = subprocess.run([*command, *one_fails], cwd=name, env=environment, capture_output=True, timeout=120)
        except subprocess.TimeoutExpired:
            fail("a rank failed, and the other one's sleep was not ended")
        if failed.returncode == 0:
            fail("a job one of whose ranks failed passed")


if __name__ == "__main__":
    modes = [files, yaml, image, gpu_image, base_image, slurm]
    {mode.__name__: mode for mode in modes}[sys.argv[1]]()
