# Ends the tritonserver of rank 0 and waits for it. Launchers and stubs also have its name in their arguments.
for process in /proc/[0-9]*; do
    words="$(tr '\0' ' ' 2> /dev/null < "${process}/cmdline")" || continue
    first="${words%% *}"
    case "${first##*/}" in mpirun | prte* | orte* | bash | sh | *_stub) continue ;; esac
    case "${words}" in *tritonserver\ --*) ;; *) continue ;; esac
    rank="$(tr '\0' '\n' 2> /dev/null < "${process}/environ" | sed -n 's/^OMPI_COMM_WORLD_RANK=//p')"
    [ "${rank:-0}" = 0 ] || continue
    kill -TERM "${process#/proc/}" 2> /dev/null || continue
    while [ -n "$(tr -d '\0' 2> /dev/null < "${process}/cmdline")" ]; do sleep 0.2; done
done
