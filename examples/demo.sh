#!/usr/bin/env bash
# A real model from a checkpoint to a measured answer: what `make demo` runs.
set -euo pipefail

show() {
    printf '\n$ %s\n' "$1"
    eval "$1"
}

show 'trtserve import demo'
show 'trtserve start --detach --auto-ports'
trap "show 'trtserve stop'" EXIT
show 'trtserve query "What is ML?"'
show 'trtserve query --stream "What is machine learning?"'
show 'trtserve bench token-norm-dist'
