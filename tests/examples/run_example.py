#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs an example under weft-run and checks what it prints.

usage: run_example.py WEFT_RUN PROGRAM CHECK [ARGUMENT …], where CHECK is a function of this file, and every run gets the
arguments besides its own.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WEFT_RUN, PROGRAM, CHECK = sys.argv[1:4]
EXTRA = sys.argv[4:]


def run(ranks, *arguments, expect=0):
    command = [WEFT_RUN, "--no-prefix", "--nproc-per-node", str(ranks), PROGRAM, *arguments, *EXTRA]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    if result.returncode != expect:
        sys.exit(f"{' '.join(command)}: exit {result.returncode}\n{result.stdout}{result.stderr}")
    return result.stdout


def refused(*arguments, ranks=1, code=1):
    """What the ranks of a job that is to end with the code say about it."""
    command = [WEFT_RUN, "--no-prefix", "--nproc-per-node", str(ranks), PROGRAM, *arguments, *EXTRA]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    expect(result.returncode == code, f"{' '.join(command)}: exit {result.returncode}, not {code}", result.stdout + result.stderr)
    return result.stderr


def command_line():
    """--help without a job; exit code 2 and nothing begun after a mistake."""
    name = os.path.basename(PROGRAM)
    help = subprocess.run([PROGRAM, "--help"], capture_output=True, text=True, timeout=100)
    expect(help.returncode == 0 and name in help.stdout, "no help", help.stdout + help.stderr)
    for wrong in (["--bogus", "3"], ["bogus"]):
        result = subprocess.run([PROGRAM, *wrong], capture_output=True, text=True, timeout=100)
        expect(result.returncode == 2 and "bogus" in result.stderr, f"{wrong}: exit {result.returncode}", result.stderr)
    options = re.findall(r"(--[a-z-]+) (INT|UINT|FLOAT|TEXT)\b", help.stdout)
    expect({option for option, _ in options} >= CHECKED_OPTIONS.get(name, set()), f"options are missing, or are no options: {options}", help.stdout)
    for option, type in options:
        if option == "--checkpoint":
            continue  # any path
        result = subprocess.run([PROGRAM, option, "abc"], capture_output=True, text=True, timeout=100)
        said = f"{option}: " in result.stderr and "abc" in result.stderr
        said = said and (type == "TEXT" or f"{option}: 'abc' is given; it takes a " in result.stderr)
        expect(result.returncode == 2 and said, f"{option} abc: exit {result.returncode}", result.stderr)


CHECKED_OPTIONS = {
    "digits": {"--backend", "--data", "--mnist", "--epochs", "--lr"},
    "sync_sgd": {"--data"},
    "batch_rpc": {"--transport"},
    "parameter_server": {"--transport", "--mode", "--steps"},
    "rnn": {"--transport", "--text", "--epochs", "--lr"},
    "gpt": {"--shard", "--text", "--lr"},
    "ddp_rpc": {"--transport", "--backend", "--epochs"},
    "pipeline": {"--transport", "--data", "--epochs"},
}


def expect(condition, what, output):
    if not condition:
        sys.exit(f"{what}:\n{output}")


def lines(output):
    return sorted(line for line in output.splitlines() if line.strip())


def p2p():
    output = run(2)
    wanted = [
        "blocking: rank 0 has data 1.0",
        "blocking: rank 1 has data 1.0",
        "immediate: rank 0 has data 1.0",
        "immediate: rank 0 started sending",
        "immediate: rank 1 has data 1.0",
        "immediate: rank 1 started receiving",
    ]
    expect(lines(output) == wanted, "p2p printed something else", output)


def rpc_add():
    output = run(2)
    wanted = [
        "a registered operator: [6, 6]",
        "async: [4, 4]",
        "remote: [5, 5]",
        "remote: the result is on worker1",
        "sync: [3, 3]",
    ]
    expect(lines(output) == wanted, "rpc_add printed something else", output)


def rpc_add_below_mpirun():
    """With the variables that Open MPI sets, and none of weft-run's."""
    ours = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}
    clean = {name: value for name, value in os.environ.items() if name not in ours and not name.startswith(("OMPI_", "PMI", "SLURM_"))}
    ranks = []
    for rank in ("0", "1"):
        own = {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": rank, "PMIX_NAMESPACE": f"weft-test-{os.getpid()}"}
        ranks.append(subprocess.Popen([PROGRAM], env={**clean, **own}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    outputs = [rank.communicate(timeout=100)[0] for rank in ranks]
    expect([rank.returncode for rank in ranks] == [0, 0], "a rank failed", "\n".join(outputs))
    expect("sync: [3, 3]" in outputs[0] and "remote: the result is on worker1" in outputs[0], "rpc_add printed something else", outputs[0])


def async_execution():
    output = run(3)
    wanted = ["a chained call: [3, 3]", "a coroutine: [4, 4]", "a promise: [2, 2]"]
    expect(lines(output) == wanted, "async_execution printed something else", output)


def batch_rpc():
    output = run(3)
    reads = re.findall(r"^(one by one|in batches) +128 requests, the matrix was read (\d+) times, ", output, re.M)
    expect(reads == [("one by one", "128"), ("in batches", "4")], "a batch is not one execution", output)
    expect(re.search(r"^speed-up +[0-9.]+x with batches of 32$", output, re.M), "batch_rpc printed something else", output)


def losses_fall(*arguments):
    output = run(3, *arguments)
    losses = re.findall(r"trainer\d: loss ([0-9.]+) at the first step, ([0-9.]+) at the last", output)
    expect(len(losses) == 2, "parameter_server printed something else", output)
    on_the_way = re.findall(r"trainer1: (\d+)/300 +loss", output)
    expect(on_the_way == ["75", "150", "225", "300"], "no progress was shown", output)
    for first, last in losses:
        expect(float(last) < 0.7 * float(first), "the loss did not fall", output)


def parameter_server():
    losses_fall()


def parameter_server_hogwild():
    losses_fall("--mode", "hogwild")


def dist_autograd():
    for ranks in (2, 3):
        output = run(ranks)
        wanted = [f"worker{rank}: the sum fell by 4.5000 in 5 steps, by 18 x 0.05 each" for rank in range(ranks)]
        on_the_way = r"worker0: (\d)/5 +sum "
        expect(re.findall(on_the_way, output) == ["2", "3", "4", "5"], "no progress was shown", output)
        rest = [line for line in lines(output) if not re.match(on_the_way, line)]
        expect(rest == wanted, f"dist_autograd on {ranks} ranks printed something else", output)


def asks_for_more_workers():
    """One worker is not enough for any of them, and the error names the command."""
    name = os.path.basename(PROGRAM)
    command = [WEFT_RUN, "--no-prefix", "--nproc-per-node", "1", PROGRAM]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    expect(result.returncode != 0, "it exited with 0", result.stdout)
    expect(re.search(rf"{name}: it takes \d workers.*: weft-run --nproc-per-node \d {name}", result.stderr), "no advice", result.stderr)
    help = subprocess.run([PROGRAM, "--help"], capture_output=True, text=True, timeout=100)
    expect(help.returncode == 0 and "--transport" in help.stdout, "no help", help.stdout + help.stderr)


def rnn():
    output = run(2)
    found = re.findall(r"^epoch: (\d+)/40 +perplexity ([\d.]+)", output, re.M)
    expect([epoch for epoch, _ in found] == ["10", "20", "30", "40"], "no progress was shown", output)
    perplexities = [float(perplexity) for _, perplexity in found]
    expect(perplexities == sorted(perplexities, reverse=True), "the perplexity does not fall", output)
    last = re.search(r"^a perplexity of ([\d.]+) after 40 epochs", output, re.M)
    expect(last and float(last.group(1)) < 2, "the perplexity did not fall below 2", output)


def pipeline():
    output = run(3)
    for stage, order in enumerate(("F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3")):
        expect(f"stage {stage}, in the last step: {order} \n" in output, f"stage {stage} went another way", output)
    losses = [float(l) for l in re.findall(r"^epoch \d/3 +loss ([\d.]+)", output, re.M)]
    expect(len(losses) == 3 and losses[2] < 0.7 * losses[0], "the loss did not fall", output)
    found = re.search(r"largest difference from one process: (\S+)", output)
    expect(found and float(found.group(1)) < 1e-10, "it does not end where one process does", output)


def pipeline_of_any_number():
    """Of one micro-batch, and of more than a worker has threads; each stage keeps to its order."""
    for micros in (1, 32):
        output = run(3, "--epochs", "1", "--micro-batches", str(micros))
        first = ["F0"] + [work for i in range(1, micros) for work in (f"F{i}", f"B{i - 1}")] + [f"B{micros - 1}"]
        last = [work for i in range(micros) for work in (f"F{i}", f"B{i}")]
        for stage, order in enumerate((first, last)):
            expect(f"stage {stage}, in the last step: {' '.join(order)} \n" in output, f"stage {stage} went another way", output)
        found = re.search(r"largest difference from one process: (\S+)", output)
        expect(found and float(found.group(1)) < 1e-10, "it does not end where one process does", output)


def pipeline_refuses_batches():
    expect("--batch-size is 100000, and there are " in refused("--batch-size", "100000", ranks=3), "another error", "")
    wrong = refused("--epochs", "1", "--micro-batches", "7", ranks=3, code=2)
    expect("it must be a multiple of --micro-batches, 7" in wrong, "another error", wrong)


def ddp_rpc():
    output = run(4)
    losses = re.findall(r"trainer\d: loss ([0-9.]+) in the first epoch, ([0-9.]+) in the last", output)
    expect(len(losses) == 2, "ddp_rpc printed something else", output)
    for first, last in losses:
        expect(float(last) < 0.5 * float(first), "the loss did not fall", output)
    expect("the trainers' dense layers are equal" in output, "the dense layers are not equal", output)
    progress = re.findall(r"^trainer0: (\d)/2 +loss ", run(4, "--epochs", "2"), re.M)
    expect(progress == ["1", "2"], "no progress was shown", str(progress))


def reinforcement_learning():  # RB-051 of the behaviours
    output = run(3)
    found = re.search(r"solved: mean reward ([0-9.]+) after", output)
    expect(found and float(found.group(1)) >= 150, "the pole was not balanced", output)


def lost_actors():
    outputs = [subprocess.run([PROGRAM, *more, *EXTRA], capture_output=True, text=True, timeout=100) for more in ([], ["--kills", "0"])]
    for output in outputs:
        expect(output.returncode == 0, f"exit {output.returncode}", output.stdout + output.stderr)
    rewards = [re.findall(r"update +\d+: mean reward +([0-9.]+),", output.stdout) for output in outputs]
    expect(len(rewards[0]) > 2 and float(rewards[0][-1]) >= 120 > 60 > float(rewards[0][0]), "the reward did not rise", outputs[0].stdout)
    expect(rewards[0] == rewards[1], "without kills the rewards are others", outputs[0].stdout + outputs[1].stdout)
    told = re.search(r"; (\d+) actors were killed and came back, (\d+) losses were reported", outputs[0].stdout)
    expect(told and told.group(1) == told.group(2) and int(told.group(1)) > 3, "not each kill was told", outputs[0].stdout)


def collectives():
    output = run(3)
    wanted = """\
before: rank r holds r + 1
  rank 0: 1 1
  rank 1: 2 2
  rank 2: 3 3
broadcast from rank 0
  rank 0: 1 1
  rank 1: 1 1
  rank 2: 1 1
reduce (sum) to rank 0: the others keep theirs
  rank 0: 6 6
  rank 1: 2 2
  rank 2: 3 3
all_reduce (sum)
  rank 0: 6 6
  rank 1: 6 6
  rank 2: 6 6
scatter from rank 0: rank r receives 10 r
  rank 0: 0 0
  rank 1: 10 10
  rank 2: 20 20
gather to rank 0 (the others show nothing received)
  rank 0: 1 1 2 2 3 3
  rank 1: 0 0 0 0 0 0
  rank 2: 0 0 0 0 0 0
all_gather
  rank 0: 1 1 2 2 3 3
  rank 1: 1 1 2 2 3 3
  rank 2: 1 1 2 2 3 3
"""
    expect(output == wanted, "collectives printed something else", output)


def sync_sgd():
    output = run(2, "--epochs", "4")
    losses = {(int(r), int(e)): float(l) for r, e, l in re.findall(r"rank (\d), epoch (\d): loss ([\d.]+)", output)}
    expect(len(losses) == 8, "sync_sgd did not print a loss for each rank and epoch", output)
    for rank in (0, 1):
        expect(losses[rank, 3] < losses[rank, 0] < 2.4, "the loss did not fall", output)


def ring_all_reduce():
    for ranks in (1, 2, 4):
        output = run(ranks)
        wanted = sorted(f"{name}: rank {rank} has {' '.join([str(ranks)] * 4)}" for name in ("whole", "chunked") for rank in range(ranks))
        expect(lines(output) == wanted, f"ring_all_reduce on {ranks} ranks printed something else", output)


def readme():
    output = run(2)
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)$", output, re.M)]
    expect(len(losses) == 4, "not four lines", output)
    expect(losses[-1] < 0.2 * losses[0], "the loss did not fall", output)


def hashes(output):
    return re.findall(r"parameters, rank \d+ +([0-9a-f]{16})", output)


def digits():
    with tempfile.TemporaryDirectory() as folder:
        whole, part = f"{folder}/whole.pt", f"{folder}/part.pt"
        output = run(2, "--checkpoint", whole)
        accuracy = float(re.search(r"test accuracy +([\d.]+)", output).group(1))
        expect(accuracy >= 0.96, f"test accuracy {accuracy}", output)
        expect(len(hashes(output)) == 2 and len(set(hashes(output))) == 1, "the ranks' parameters differ", output)
        expect(re.search(r"throughput +\d+ samples/s", output), "no throughput", output)
        expect(re.search(r"waiting for others +[\d.]+ %", output), "no share of waiting", output)
        expect(len(re.findall(r"^epoch +\d+/12 +loss [\d.]+ +accuracy [\d.]+", output, re.M)) == 12, "not a line for each epoch", output)
        # Interrupted and resumed, it ends at the same parameters.
        run(2, "--checkpoint", part, "--epochs", "5")
        resumed = run(2, "--checkpoint", part, "--resume")
        expect("resuming after epoch 5" in resumed, "it did not resume", resumed)
        expect(hashes(resumed) == hashes(output), "a resumed run ends elsewhere", resumed + output)


def digits_by_any_transport():
    """Two ranks' sums have one order only, so every transport ends at the same bits."""
    with tempfile.TemporaryDirectory() as folder:
        ends = {}
        for backend in ("gloo", "shm", "tcp"):
            output = run(2, "--backend", backend, "--epochs", "3", "--checkpoint", f"{folder}/{backend}.pt")
            expect(len(hashes(output)) == 2 and len(set(hashes(output))) == 1, f"{backend}: the ranks differ", output)
            ends[backend] = hashes(output)[0]
        expect(len(set(ends.values())) == 1, "the transports end at different parameters", str(ends))


def is_below(process, ancestor):
    """Whether the process was started by the other, or below it."""
    while process > 1 and process != ancestor:
        process = int(Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[1])
    return process == ancestor


def digits_without_a_rank():
    """SIGKILL of one rank in the middle of training: the other ends within 10 s with an error that names it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [WEFT_RUN, "--no-prefix", "--nproc-per-node", "2", PROGRAM, "--epochs", "1000", "--checkpoint", f"{folder}/d.pt"]
        job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        output = ""
        while "epoch  2/" not in output:
            line = job.stdout.readline()
            expect(line, "training ended by itself", output)
            output += line
        ranks = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                if not is_below(int(entry.name), job.pid) or Path(os.readlink(entry / "exe")) != Path(PROGRAM).resolve():
                    continue
                environment = dict(item.split("=", 1) for item in (entry / "environ").read_text().split("\0") if "=" in item)
                ranks[int(environment["RANK"])] = int(entry.name)
            except (OSError, KeyError):
                continue
        expect(set(ranks) == {0, 1}, f"found ranks {ranks}", output)
        os.kill(ranks[1], signal.SIGKILL)
        start = time.monotonic()
        rest, errors = job.communicate(timeout=30)
        seconds = time.monotonic() - start
        expect(job.returncode != 0, "it exited with 0", rest + errors)
        expect(seconds < 10, f"it took {seconds:.1f} s", rest + errors)
        expect("rank 1 is lost" in errors, "the error does not name rank 1", errors)
        expect("weft-run: rank 1 failed first: signal 9" in errors, "weft-run blames another", errors)


def digits_start_again():
    """A rank is killed behind the first checkpoint; the job goes on from there, and ends as one that nothing befell."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = f"{folder}/run.pt"
        script = (f'if [ $RANK = 1 ] && [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then '
                  f'(until [ -e {checkpoint} ]; do sleep 0.02; done; kill -KILL $$) & fi; '
                  f'exec {PROGRAM} --epochs 40 --checkpoint {checkpoint} $([ -e {checkpoint} ] && echo --resume)')
        command = [WEFT_RUN, "--no-prefix", "--nproc-per-node", "2", "--max-restarts", "1", "sh", "-c", script]
        result = subprocess.run(command, capture_output=True, text=True, timeout=150)
        output = result.stdout + result.stderr
        expect(result.returncode == 0, f"exit {result.returncode}", output)
        expect("rank 1 failed first: signal 9 (Killed); the ranks start again, 1 of 1 restarts used" in output, "no restart", output)
        expect(re.search(r"resuming after epoch [1-9]", output), "it began anew", output)
        undisturbed = run(2, "--epochs", "40", "--checkpoint", f"{folder}/other.pt")
        expect(hashes(result.stdout) == hashes(undisturbed), "it ended otherwise", output + undisturbed)


def digits_resume_with_a_rate():
    with tempfile.TemporaryDirectory() as folder:
        ends = []
        for more in ([], ["--lr", "1e-12"]):
            checkpoint = f"{folder}/{len(more)}.pt"
            run(1, "--checkpoint", checkpoint, "--epochs", "1")
            ends.append(hashes(run(1, "--checkpoint", checkpoint, "--epochs", "2", "--resume", *more)))
        expect(ends[0] != ends[1], "--lr changes nothing on --resume", str(ends))


GPT_SMALL = ["--layers", "2", "--width", "32", "--context", "32", "--batch-size", "16", "--warmup", "5", "--sample", "0"]


def gpt_losses(output):
    """step -> its loss on the text that is learnt, and on the other"""
    found = re.findall(r"step +(\d+)/\d+  loss ([0-9.]+)  on unseen text ([0-9.]+)", output)
    return {int(step): (float(train), float(test)) for step, train, test in found}


def gpt():
    """Four ranks in two copies learn in bfloat16, with each of the options that training has, and write text."""
    with tempfile.TemporaryDirectory() as folder:
        output = run(4, "--shard", "2", "--bf16", "--recompute", "--accumulate", "2", "--steps", "60", "--evaluate-every", "30",
                     "--layers", "2", "--context", "32", "--width", "32", "--checkpoint", f"{folder}/gpt")
        expect("copies: 2; ranks of a copy: 2" in output, "another mesh", output)
        losses = gpt_losses(output)
        expect(sorted(losses) == [30, 60] and losses[60][0] < losses[30][0] < 3.3, "the loss does not fall", output)
        expect(len(output.split("--- written by the model:\n")[1]) >= 200, "no text", output)


def gpt_on_any_mesh():
    """The loss after as many steps differs only by the order in which fp32 numbers are added."""
    with tempfile.TemporaryDirectory() as folder:
        ends = {}
        for ranks, shard in ((1, 1), (2, 1), (2, 2), (4, 2), (8, 4)):
            output = run(ranks, *GPT_SMALL, "--shard", str(shard), "--steps", "30", "--checkpoint", f"{folder}/{ranks}.{shard}")
            ends[ranks, shard] = gpt_losses(output)[30]
        alone = ends[1, 1]
        for mesh, end in ends.items():
            expect(all(abs(a - b) < 2e-4 for a, b in zip(end, alone)), f"{mesh}: another loss", str(ends))
        expect(alone[0] < 3.3, "nothing is learnt", str(ends))


def gpt_resumes():
    """Two ranks train to step 20, within an epoch; four in two copies go on, and end as those that were not interrupted."""
    with tempfile.TemporaryDirectory() as folder:
        whole = gpt_losses(run(2, *GPT_SMALL, "--steps", "40", "--checkpoint", f"{folder}/whole"))[40]
        run(2, *GPT_SMALL, "--steps", "40", "--stop-after", "20", "--checkpoint", f"{folder}/cut")
        output = run(4, *GPT_SMALL, "--shard", "2", "--steps", "40", "--resume", "--checkpoint", f"{folder}/cut")
        expect("resuming after step 20, in epoch 0" in output, "it began anew", output)
        end = gpt_losses(output)[40]
        expect(all(abs(a - b) < 2e-4 for a, b in zip(end, whole)), "it ended otherwise", f"{whole}\n{output}")


def gpt_refuses():
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = ["--checkpoint", f"{folder}/gpt"]
        error = refused("--shard", "2", *checkpoint, ranks=3)
        expect("--shard: 3 ranks do not divide by 2" in error, "another error", error)
        error = refused("--batch-size", "9", *checkpoint, ranks=2)
        expect("--batch-size: 9 examples do not divide by ranks x --accumulate, 2" in error, "another error", error)
        error = refused("--resume", *checkpoint)
        expect(f"--resume: '{folder}/gpt' has no checkpoint" in error, "another error", error)


def digits_refuse_checkpoints():
    with tempfile.TemporaryDirectory() as folder:
        whole = f"{folder}/whole.pt"
        run(1, "--checkpoint", whole, "--epochs", "1")
        bad = Path(folder, "bad.pt")
        for content in (Path(whole).read_bytes()[:1000], b"garbage", b""):
            bad.write_bytes(content)
            error = refused("--checkpoint", str(bad), "--resume")
            expect(f"'{bad}' is not a checkpoint of this program" in error and "miniz" not in error, "another error", error)
        error = refused("--checkpoint", f"{folder}/missing.pt", "--resume")
        expect(f"--resume: '{folder}/missing.pt' does not exist" in error, "another error", error)
        for target in (f"{folder}/missing/x.pt", folder, "/proc/x.pt"):
            error = refused("--checkpoint", target, "--epochs", "1")
            expect(f"the checkpoint '{target}' cannot be written" in error, "another error", error)
        left = sorted(entry.name for entry in Path(folder).iterdir())
        expect(left == ["bad.pt", "whole.pt"], "files are left behind", str(left))


def write_mnist(folder, part, labels, height=8, width=8):
    import struct

    images = struct.pack(">IIII", 0x803, len(labels), height, width) + bytes(len(labels) * height * width)
    Path(folder, f"{part}-images-idx3-ubyte").write_bytes(images)
    Path(folder, f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, len(labels)) + bytes(labels))


def digits_refuse_data():
    expect("'-1' is given; it takes a whole number" in refused("--seed", "-1", code=2), "--seed -1", "")
    faults = [
        ({"train": {"labels": []}}, "train-images-idx3-ubyte: holds no images"),
        ({"t10k": {"labels": []}}, "t10k-images-idx3-ubyte: holds no images"),
        ({"train": {"labels": [1, 200]}}, "train-labels-idx1-ubyte: holds the label 200"),
        ({"t10k": {"labels": [1], "height": 10}}, "the training images are of 8x8 pixels, those for testing of 10x8"),
        ({"train": {"labels": [1], "height": 1, "width": 1}}, "train-images-idx3-ubyte: holds images of 1x1 pixels"),
        ({"t10k": None}, "t10k-images-idx3-ubyte: does not exist, with or without .gz"),
    ]
    for fault, text in faults:
        with tempfile.TemporaryDirectory() as folder:
            for part, wanted in {"train": {"labels": [1, 2]}, "t10k": {"labels": [3]}, **fault}.items():
                if wanted is not None:
                    write_mnist(folder, part, **wanted)
            checkpoint = Path(folder, "m.pt")
            error = refused("--mnist", folder, "--epochs", "1", "--checkpoint", str(checkpoint))
            expect(text in error, f"{fault}: another error", error)
            expect(not checkpoint.exists(), f"{fault}: it wrote a checkpoint", "")


def digits_mnist():
    """The IDX files of MNIST's layout, here with the digits' own pixels."""
    import gzip
    import struct

    rows = [list(map(int, line.split(","))) for line in gzip.open(Path(__file__).parents[2] / "examples/digits/data/digits.csv.gz", "rt")]
    with tempfile.TemporaryDirectory() as folder:
        for part, chosen in (("train", rows[:600]), ("t10k", rows[600:700])):
            images = struct.pack(">IIII", 0x803, len(chosen), 8, 8) + bytes(16 * v - (v > 0) for row in chosen for v in row[:64])
            labels = struct.pack(">II", 0x801, len(chosen)) + bytes(row[64] for row in chosen)
            Path(folder, f"{part}-images-idx3-ubyte").write_bytes(images)
            with gzip.open(Path(folder, f"{part}-labels-idx1-ubyte.gz"), "wb") as file:
                file.write(labels)
        output = run(2, "--mnist", folder, "--epochs", "1", "--checkpoint", f"{folder}/m.pt")
        expect("600 training and 100 test images of 8x8" in output, "the files were not read", output)
        Path(folder, "train-images-idx3-ubyte").write_bytes(b"not an image")
        result = run(1, "--mnist", folder, "--checkpoint", f"{folder}/m.pt", expect=1)


globals()[CHECK]()
print("ok")
