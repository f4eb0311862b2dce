#!/usr/bin/env bash
# A model from a checkpoint to a measured answer, with the model that ships with trtserve. `make demo` runs it.
set -euo pipefail

show() {
    printf '\n$ %s\n' "$1"
    eval "$1"
}

# Download (here: copy), convert, build and assemble a Triton model repository. What exists is reused.
show 'trtserve import demo'

# Serve it in the background. --auto-ports takes other ports where 8000 to 8002 are in use.
show 'trtserve start --detach --auto-ports'
trap "show 'trtserve stop'" EXIT

# Ask: the whole answer at once, then another one token by token.
show 'trtserve query "What is ML?"'
show 'trtserve query --stream "What is a KV cache?"'

# Measure: 100 requests with prompts of random length, 8 at a time.
show 'trtserve bench token-norm-dist'
