#!/usr/bin/env bash
# Set up and run the tests or benchmarks for GPUs: run.sh test|bench [PART ...]
# With a bundle (`make gpu-bundle`) in .gpu no network is used; otherwise pip installs what is missing into .venv.
set -euo pipefail
cd "$(dirname "$0")/../.."
bundle=.gpu/environment.tar.xz
if [ -e "$bundle" ]; then
    environment=${TRTSERVE_GPU_ENVIRONMENT:-/tmp/trtserve-gpu}
    [ -x "$environment/bin/mpirun" ] || bash tests/gpu/setup.sh "$bundle" "$environment"
else
    environment=$PWD/.venv
    [ -x "$environment/bin/python" ] || python3 -m venv "$environment"
    "$environment/bin/python" -m pip install --quiet --editable '.[cuda,dev,oracle]'
fi
export PATH="$environment/bin:$PATH"
exec python -m tests.gpu "$@"
