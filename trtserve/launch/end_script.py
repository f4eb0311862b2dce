"""The orderly end of a launch from inside of its container, where mpirun is the process that others ask to end.

mpirun kills its ranks a moment after it is asked. The tritonserver that answers finishes its requests first, and the
other ranks end after it.
"""

from __future__ import annotations

END_SCRIPT = """\
# Ends the tritonserver of rank 0, and waits for its end. Launchers and stubs name it in their arguments too.
for process in /proc/[0-9]*; do
    words="$(tr '\\0' ' ' 2> /dev/null < "${process}/cmdline")" || continue
    first="${words%% *}"
    case "${first##*/}" in mpirun | prte* | orte* | bash | sh | *_stub) continue ;; esac
    case "${words}" in *tritonserver\\ --*) ;; *) continue ;; esac
    rank="$(tr '\\0' '\\n' 2> /dev/null < "${process}/environ" | sed -n 's/^OMPI_COMM_WORLD_RANK=//p')"
    [ "${rank:-0}" = 0 ] || continue
    kill -TERM "${process#/proc/}" 2> /dev/null || continue
    while [ -n "$(tr -d '\\0' 2> /dev/null < "${process}/cmdline")" ]; do sleep 0.2; done
done
"""
"""A script for bash."""
