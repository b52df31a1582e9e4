#!/bin/sh
# Used while the image is built. `install.sh needs EXTRA...` makes /opt/koinon, a virtual environment with
# the packages that Koinon and these extras need. `install.sh koinon SOURCE` puts Koinon's own files for
# that environment under /opt/package.
set -eu
cd /build
environment=/opt/koinon
export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

what=$1
shift

if ls ./*.whl >/dev/null 2>&1; then
    export PIP_NO_INDEX=1 PIP_FIND_LINKS=/build
fi
pip=$(ls ./pip-*.whl /usr/share/python-wheels/pip-*.whl 2>/dev/null | head -n 1)
if [ -z "$pip" ]; then
    apt-get update
    apt-get install --yes --no-install-recommends ca-certificates python3-pip-whl
    pip=$(ls /usr/share/python-wheels/pip-*.whl)
fi
[ -d "$environment" ] || python3 -m venv --without-pip "$environment"

# pip runs from its wheel, so it is in none of the layers of the image.
pip_install() {
    "$environment/bin/python" "$pip/pip" install --no-compile "$@"
}

case "$what" in
    needs)
        python3 requirements.py pyproject.toml "$@" >requirements.txt
        pip_install --requirement requirements.txt
        cd "$environment"/lib/python3*/site-packages
        rm -rf pyarrow/tests pyarrow/include pyarrow/src
        find numpy pandas -type d -name tests -prune -exec rm -rf {} + 2>/dev/null || true
        # Check that nothing needed was removed: nodes load Arrow only with their first bulk load.
        "$environment/bin/python" -c 'import grpc, lmdb, numpy, pyarrow.compute, pyarrow.csv'
        "$environment/bin/python" -c 'import pyarrow.dataset, pyarrow.json, pyarrow.parquet'
        ;;
    koinon)
        pip_install --no-deps --prefix /opt/package "$1"
        cd /opt/package/lib/python3*/site-packages
        ;;
esac
"$environment/bin/python" -m compileall -q -j 0 .
