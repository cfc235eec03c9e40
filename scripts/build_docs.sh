#!/usr/bin/env bash
# Builds the documentation as a site that works without a network and without a server.
set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'HELP'
usage: scripts/build_docs.sh [--serve]

Makes a private environment under .venv/docs (the first time only), and writes the site of this version of torchmpi into
build/site/VERSION, and build/site/index.html, which lists the versions that were built. Any warning is an error.

  --serve     show the site at http://127.0.0.1:8000 instead, and build it again when a page changes
  -h, --help  this text

Environment: PYTHON, the interpreter to use; VENV_DIR, where the private environments go (default .venv).
HELP
}

serve=
case ${1:-} in
    "") ;;
    --serve) serve=1 ;;
    -h | --help) usage; exit 0 ;;
    *) fail "unknown option '$1'" "See $0 --help" ;;
esac

cd "$checkout"
find_python
# Nothing of torchmpi is imported, so that the environment has neither torch nor an MPI.
if ! environment_ready docs docs; then
    make_venv "$environments/docs"
    say "Installing into $environments/docs:"
    requirements --only docs >"$environments/docs/requirements.txt"
    pip_install docs -r "$environments/docs/requirements.txt" -c constraints.txt
    { fingerprint docs; echo docs; } >"$environments/docs/installed"
fi
use_environment docs
export NO_MKDOCS_2_WARNING=1 # printed by the theme
[ -z "$serve" ] || exec python -m mkdocs serve --dev-addr 127.0.0.1:8000

version=$(python -c 'import runpy; print(runpy.run_path("torchmpi/_version.py")["__version__"])')
site=$checkout/build/site
python -m mkdocs build --strict --site-dir "$site/$version"
{
    printf '<!doctype html><meta charset="utf-8"><title>torchmpi</title><h1>Documentation of torchmpi</h1><ul>\n'
    for page in $(cd "$site" && printf '%s\n' */index.html | sort -rV); do
        printf '<li><a href="%s">%s</a></li>\n' "$page" "${page%/index.html}"
    done
    printf '</ul>\n'
} >"$site/index.html"
say "The site of torchmpi $version: $site/$version/index.html"
