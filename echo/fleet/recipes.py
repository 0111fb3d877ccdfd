"""Makes the files that start a plan's workers on machines of different providers.

Each offer has one file, which starts all machines of the offer. The first lines of each file
explain its use. A worker's name ends with the number of its machine. In the settings, the
placeholder `NAME` is replaced by this name.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

NAME = "@NAME@"
"""Placeholder for a worker's name in the worker's settings."""
IMAGE = "registry.example.com/echo-worker:latest"
"""Placeholder for the container image of a worker. Users build the image from
configs/Containerfile."""
JOIN = "the line in runs/NAME/keys/join where the learner runs"
DRAIN_S = 90
"""Seconds from the request to stop to the kill. In this time a worker delivers finished groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """The machines of one offer. Each machine runs one worker."""

    name: str
    """Name of the offer. The workers' names are this name with -1, -2, ..."""
    count: int
    gpu: str
    """The GPU's full name, such as "NVIDIA GeForce RTX 4090"."""
    num_gpus: int
    is_spot: bool
    """Whether the provider may take the machines away."""
    settings: Sequence[str]
    """The arguments of `--set` for each worker. NAME is a placeholder for the worker's name."""
    least: str
    """The minimum requirements for a machine, in the syntax of `vastai search offers`."""
    disk_gb: int


def recipe(kind: str, machines: Machines, *, config: str, image: str = IMAGE) -> tuple[str, str]:
    """Return the name and the text of the file that starts an offer's workers.

    Args:
        kind: one of KINDS.
        machines: the machines of the offer.
        config: path of the configuration file, on each machine and in the image.
        image: the container image.
    """
    pattern, write = _WRITERS[kind]
    file = pattern.format(machines.name)
    return file, write(machines, config, image, file)


def _words(machines: Machines, config: str, name: str) -> list[str]:
    words = ["--role", "worker", "--config", config]
    for setting in machines.settings:
        words += ["--set", setting.replace(NAME, name)]
    return words


def _line(words: Sequence[str], variable: str) -> str:
    """Return a shell command with one `--set` per line.

    The shell replaces `variable` by its value.
    """

    def quoted(word: str) -> str:
        if variable not in word:
            return shlex.quote(word)
        before, after = ("".join(map(_escaped, part)) for part in word.split(variable, 1))
        return f'"{before}{variable}{after}"'

    return " ".join(map(quoted, words)).replace(" --set", " \\\n    --set")


def _escaped(character: str) -> str:
    return f"\\{character}" if character in '"\\$`' else character


def _shell(machines: Machines, config: str, image: str, file: str) -> str:
    return f"""#!/usr/bin/env bash
# Start worker NUMBER of {machines.name} on this machine, in the checkout:
#   ECHO_JOIN=... bash {file} NUMBER
# ECHO_JOIN: {JOIN}
set -euo pipefail
: "${{ECHO_JOIN:?set it to {JOIN}}}"
NAME={machines.name}-${{1:?the number of this machine, 1 to {machines.count}}}
exec bin/echo-node {_line(_words(machines, config, "$NAME"), "$NAME")}
"""


def _systemd(machines: Machines, config: str, image: str, file: str) -> str:
    words = _words(machines, config, f"{machines.name}-%i")
    line = " ".join(shlex.quote(word.replace("$", "$$")) for word in words)
    return f"""# Worker NUMBER of {machines.name}. On its machine, whose checkout is /opt/echo-rl:
#   install -m 600 /dev/stdin /etc/echo-rl.env <<< ECHO_JOIN=...
#   cp {file} /etc/systemd/system/
#   systemctl enable --now echo-worker-{machines.name}@NUMBER
# ECHO_JOIN: {JOIN}
[Unit]
Description=Echo worker {machines.name}-%i
After=network-online.target
Wants=network-online.target

[Service]
WorkingDirectory=/opt/echo-rl
EnvironmentFile=/etc/echo-rl.env
ExecStart=/opt/echo-rl/bin/echo-node {line}
Restart=on-failure
RestartSec=30
TimeoutStopSec={DRAIN_S}
LimitNOFILE=65536

[Install]
WantedBy=multi-user.target
"""


def _slurm(machines: Machines, config: str, image: str, file: str) -> str:
    return f"""#!/usr/bin/env bash
# The workers of {machines.name} as a job array. In the checkout:
#   ECHO_JOIN=... sbatch {file}
# ECHO_JOIN: {JOIN}
#SBATCH --job-name=echo-{machines.name}
#SBATCH --array=1-{machines.count}
#SBATCH --nodes=1
#SBATCH --gpus={machines.num_gpus}
#SBATCH --export=ALL
#SBATCH --signal=B:TERM@{DRAIN_S}
#SBATCH --requeue
set -euo pipefail
: "${{ECHO_JOIN:?set it to {JOIN}}}"
NAME={machines.name}-$SLURM_ARRAY_TASK_ID
exec bin/echo-node {_line(_words(machines, config, "$NAME"), "$NAME")}
"""


def _skypilot(machines: Machines, config: str, image: str, file: str) -> str:
    line = _line(_words(machines, config, "$NAME"), "$NAME").replace("\n", "\n  ")
    return f"""# The workers of {machines.name}, one on each node. In the checkout:
#   ECHO_JOIN=... sky launch -c {machines.name} --secret ECHO_JOIN {file}
# ECHO_JOIN: {JOIN}
name: {machines.name}
num_nodes: {machines.count}
workdir: .
resources:
  accelerators: {_sky_gpu(machines.gpu)}:{machines.num_gpus}
  disk_size: {max(machines.disk_gb, 50)}
  use_spot: {str(machines.is_spot).lower()}
secrets:
  ECHO_JOIN: null
setup: |
  bin/echo-setup --role worker --extra vllm
run: |
  NAME={machines.name}-$((SKYPILOT_NODE_RANK + 1))
  exec bin/echo-node {line}
"""


def _sky_gpu(name: str) -> str:
    """Return SkyPilot's name of a GPU: "RTX4090" for "NVIDIA GeForce RTX 4090"."""
    words = name.removeprefix("NVIDIA ").removeprefix("GeForce ").split()
    return "".join(words) if words[0] == "RTX" else "-".join(words)


def _kubernetes(machines: Machines, config: str, image: str, file: str) -> str:
    name = machines.name.lower().replace("_", "-").replace(".", "-")
    words = _words(machines, config, "$(POD_NAME)")
    arguments = "".join(f"\n            - {json.dumps(word)}" for word in words)
    return f"""# The workers of {machines.name}, from an image of configs/Containerfile:
#   kubectl create secret generic echo-join --from-literal=ECHO_JOIN=...      (once)
#   kubectl apply -f {file}
# ECHO_JOIN: {JOIN}
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {name}
spec:
  serviceName: {name}
  replicas: {machines.count}
  podManagementPolicy: Parallel
  selector:
    matchLabels: {{app: {name}}}
  template:
    metadata:
      labels: {{app: {name}}}
    spec:
      terminationGracePeriodSeconds: {DRAIN_S}
      containers:
        - name: worker
          image: {image}
          args:{arguments}
          env:
            - name: POD_NAME
              valueFrom: {{fieldRef: {{fieldPath: metadata.name}}}}
          envFrom:
            - secretRef: {{name: echo-join}}
          resources:
            limits:
              nvidia.com/gpu: {machines.num_gpus}
          volumeMounts:
            - {{name: shm, mountPath: /dev/shm}}
      volumes:
        - name: shm
          emptyDir: {{medium: Memory}}
"""


def _vast(machines: Machines, config: str, image: str, file: str) -> str:
    line = _line(_words(machines, config, "$NAME"), "$NAME")
    return f"""#!/usr/bin/env bash
# Rent the cheapest sufficient machines for the workers of {machines.name} on Vast.ai:
#   ECHO_JOIN=... bash {file}
# `vastai show instances` lists them, `vastai destroy instance ID` ends one.
# ECHO_JOIN: {JOIN}
set -euo pipefail
: "${{ECHO_JOIN:?set it to {JOIN}}}"
LEAST={shlex.quote(machines.least)}
number=0
for id in $(vastai search offers "$LEAST" -o dph --raw | python3 -c 'import json, sys
print(*[offer["id"] for offer in json.load(sys.stdin)][:{machines.count}])'); do
    number=$((number + 1))
    NAME={machines.name}-$number
    vastai create instance "$id" --image {shlex.quote(image)} --disk {machines.disk_gb} \\
        --env "-e ECHO_JOIN=$ECHO_JOIN" --args {line}
done
echo "$number of {machines.count} machines rented"
"""


def _runpod(machines: Machines, config: str, image: str, file: str) -> str:
    return f"""#!/usr/bin/env bash
# Rent machines for the workers of {machines.name} on RunPod:
#   ECHO_JOIN=... bash {file}
# `runpodctl get pod` lists them, `runpodctl remove pod ID` ends one.
# ECHO_JOIN: {JOIN}
set -euo pipefail
: "${{ECHO_JOIN:?set it to {JOIN}}}"
for number in $(seq {machines.count}); do
    NAME={machines.name}-$number
    arguments=({_line(_words(machines, config, "$NAME"), "$NAME")})
    runpodctl create pod --name "$NAME" --imageName {shlex.quote(image)} \\
        --gpuType {shlex.quote(machines.gpu)} --gpuCount {machines.num_gpus} \\
        --containerDiskSize {machines.disk_gb} --env "ECHO_JOIN=$ECHO_JOIN" \\
        --args "${{arguments[*]@Q}}"
done
"""


_WRITERS: dict[str, tuple[str, Callable[[Machines, str, str, str], str]]] = {
    "shell": ("worker-{}.sh", _shell),
    "systemd": ("echo-worker-{}@.service", _systemd),
    "slurm": ("worker-{}.sbatch", _slurm),
    "kubernetes": ("worker-{}.kubernetes.yaml", _kubernetes),
    "skypilot": ("worker-{}.skypilot.yaml", _skypilot),
    "vast": ("worker-{}.vast.sh", _vast),
    "runpod": ("worker-{}.runpod.sh", _runpod),
}
KINDS = tuple(_WRITERS)
"""The kinds of providers for which files can be made."""
