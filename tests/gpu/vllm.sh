#!/usr/bin/env bash
# An interpreter with vLLM on a machine with PyTorch and no network: vllm.sh ENVIRONMENT PIECE...
# The pieces, in order, are one tar of tar.xz files whose members are packages (docs/gpu.md says which).
# `python3` must be the machine's own: the packages of an environment that it is in are not found again.
set -euo pipefail
environment=$1
shift
python3 -m venv --without-pip "$environment"
site=$(echo "$environment"/lib/python3.*/site-packages)
cat "$@" | tar -xf - -C "$environment"
for part in "$environment"/*.tar.xz; do
    tar -xJf "$part" -C "$site" &
done
wait
[ ! -d "$site/site" ] || mv "$site"/site/* "$site"
python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), sep="\n")' >"$site/machine.pth"
"$environment/bin/python" -c 'import vllm; print("vLLM", vllm.__version__)'
