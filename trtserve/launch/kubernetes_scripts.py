"""The scripts of a LeaderWorkerSet's pods: workers run sshd, the leader starts all ranks through it with mpirun.

NVIDIA's images have no sshd: one is made of them with `apt-get install openssh-server`, and the scripts say so.
"""

from __future__ import annotations

import shlex

from trtserve.launch.base import Launch

SSH_PORT = 2222
"""Not 22, so that pods on the host's network do not meet the node's own sshd."""

_SSHD = "this image has no sshd: make one of it with apt-get install openssh-server (docs/clusters.md)"

_KEYS = """\
mask="$(umask)"
umask 077
mkdir -p "${{HOME}}/.ssh"
cp {ssh}/ssh-privatekey "${{HOME}}/.ssh/id"
ssh-keygen -y -f "${{HOME}}/.ssh/id" > "${{HOME}}/.ssh/authorized_keys"
"""

_WORKER = """\
#!/bin/bash
# A worker of a LeaderWorkerSet: it waits for the leader's mpirun, which starts this pod's ranks through ssh.
set -euo pipefail
if ! command -v /usr/sbin/sshd > /dev/null; then
    echo "{sshd}" >&2
    exit 1
fi
{keys}ssh-keygen -q -t ed25519 -N '' -f "${{HOME}}/.ssh/host" <<< y > /dev/null
# A login has what the image and the cluster have set, as the leader has: sshd drops it, and PAM sets a PATH of its own.
cat /proc/self/environ > "${{HOME}}/.ssh/environment"
cat > "${{HOME}}/.ssh/session" << 'END'
mapfile -d '' -t entries < "${{0%/*}}/environment"
exec env "${{entries[@]}}" bash -c "${{SSH_ORIGINAL_COMMAND:-}}"
END
umask "${{mask}}"
if ((EUID == 0)); then
    mkdir -p /run/sshd
fi
# Whole paths: by itself sshd takes the home of /etc/passwd, where an image's own may be another. StrictModes would
# refuse a home that others may write to, which an emptyDir is; in a pod there are no others.
exec /usr/sbin/sshd -D -e -p {port} -h "${{HOME}}/.ssh/host" -o PidFile=none -o StrictModes=no \\
    -o AuthenticationMethods=publickey -o AuthorizedKeysFile="${{HOME}}/.ssh/authorized_keys" \\
    -o PermitRootLogin=prohibit-password -o ForceCommand="bash ${{HOME}}/.ssh/session"
"""

WORKER_END = """\
# A worker that is asked to end waits for the leader's daemon here: its ranks answer what is in flight.
while grep -qsE '^[0-9]+ \\((prted|orted)\\) [^Z]' /proc/[0-9]*/stat; do sleep 0.5; done
"""
"""A script for bash: the cluster ends all pods of a group at once, and with sshd a pod's ranks would go at once."""

_LEADER = """\
#!/bin/bash
# The leader of a LeaderWorkerSet: rank 0 and its neighbours run here, the others in the workers' pods, in their order.
set -euo pipefail
if ! command -v ssh > /dev/null; then
    echo "{sshd}" >&2
    exit 1
fi
{keys}printf '%s\\n' 'Host *' 'Port {port}' "IdentityFile ${{HOME}}/.ssh/id" 'StrictHostKeyChecking no' \\
    'UserKnownHostsFile /dev/null' 'LogLevel ERROR' 'ConnectTimeout 5' > "${{HOME}}/.ssh/config"
umask "${{mask}}"
pod="${{LWS_LEADER_ADDRESS%%.*}}"
domain="${{LWS_LEADER_ADDRESS#*.}}"
hosts=("$(hostname)")
for ((index = 1; index < LWS_GROUP_SIZE; index++)); do
    hosts+=("${{pod}}-${{index}}.${{domain}}")
done
for host in "${{hosts[@]:1}}"; do
    until ssh -F"${{HOME}}/.ssh/config" "${{host}}" true; do
        if ((SECONDS > {wait})); then
            echo "${{host}} does not answer" >&2
            exit 1
        fi
        sleep 2
    done
done
# Pods have addresses under their whole names alone, which Open MPI cuts at the first dot (4) or may cut (5).
export OMPI_MCA_orte_keep_fqdn_hostnames=1 PRTE_MCA_prte_keep_fqdn_hostnames=1
# By itself ssh takes the home of /etc/passwd, where an image's own may be another.
export PRTE_MCA_plm_ssh_args="-F${{HOME}}/.ssh/config" OMPI_MCA_plm_rsh_args="-F${{HOME}}/.ssh/config"
# Called by its whole path, mpirun finds its daemon at the same place on the other nodes.
exec "$(command -v mpirun)" --allow-run-as-root --tag-output \\
{ranks}
"""


def worker_script(ssh: str) -> str:
    """What a worker's pod runs; `ssh` is the folder of the key."""
    return _WORKER.format(keys=_KEYS.format(ssh=ssh), port=SSH_PORT, sshd=_SSHD)


def leader_script(launch: Launch, each: int, ssh: str, wait: int) -> str:
    """What the leader's pod runs: `each` ranks on every node, rank 0 here; an orchestrator is one more here.

    It waits `wait` seconds for the other pods, which may have to pull the image.
    """
    exported = "".join(f"-x {name} " for name in launch.environment)
    more = 1 if launch.mode == "orchestrator" else 0
    ranks = [
        f'    -n 1 --host "${{hosts[{max(0, rank - more) // each}]}}:{each + more}" {exported}{shlex.join(group)} :'
        for rank, group in enumerate(launch.groups)
    ]
    return _LEADER.format(keys=_KEYS.format(ssh=ssh), port=SSH_PORT, sshd=_SSHD, wait=wait, ranks=" \\\n".join(ranks))
