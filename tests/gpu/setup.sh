#!/usr/bin/env bash
# Make an environment for the GPU tests without network: setup.sh BUNDLE ENVIRONMENT
# It is the bundle's packages in front of those of the machine's own python3, which has PyTorch.
set -euo pipefail
bundle=$1 environment=$2 checkout=$(cd "$(dirname "$0")/../.." && pwd)

version=$(python3 -c 'import sys; print("{}.{}".format(*sys.version_info))')
[ "$version" = 3.12 ] || { echo "the bundle is for Python 3.12; python3 here is $version" >&2; exit 1; }
python3 -m venv --without-pip "$environment"
tar -xJf "$bundle" -C "$environment"
site=$environment/lib/python3.12/site-packages
# Scripts of wheels begin with `#!python`.
for script in "$environment"/bin/*; do
    if [ ! -L "$script" ] && [ "$(head -c 8 "$script" | tr -d '\0')" = '#!python' ]; then
        sed -i "1s|^#!python.*|#!$environment/bin/python|" "$script"
    fi
done
python3 - "$site" "$checkout" <<'PYTHON'
import sys, sysconfig
from pathlib import Path

site, checkout = map(Path, sys.argv[1:])
(site / "machine.pth").write_text(f"{checkout}\n{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
# The machine's were built for NumPy 2; transformers works without them.
(site / "hidden.pth").write_text('import sys; sys.modules.update(dict.fromkeys(("sklearn", "scipy", "pandas")))\n')
# `trtserve` as pip would install it.
script = site.parents[2] / "bin" / "trtserve"
script.write_text(f"#!{site.parents[2]}/bin/python\nfrom trtserve.__main__ import main\n\nif __name__ == '__main__':\n    raise SystemExit(main())\n")
script.chmod(0o755)
PYTHON
"$environment/bin/python" -c '
import numpy, torch, tritonclient.grpc, mpi4py, trtserve
print("NumPy", numpy.__version__, "PyTorch", torch.__version__, "GPUs", torch.cuda.device_count())'
