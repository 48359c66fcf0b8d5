#!/bin/bash
# Builds the wheel from this tree and installs it: one command on a bare Debian or Ubuntu machine.
#   bash tools/install.sh --help
set -eu -o pipefail

usage() {
  cat <<'END'
usage: bash tools/install.sh [option]... [-- pip option...]

Builds the wheel with ./bazelw, installs it and looks whether it can be imported. On Debian and
Ubuntu what is missing (Python, its headers and venv, a C++ compiler, Bazel) is installed with
apt-get, by sudo where this is not root.

  --venv DIR       install into this virtual environment, which is made if it is not there
  --python PYTHON  install into this interpreter's environment
  --kernels SET    default (CPU), gpu (CPU and GPU), catalog or own: see docs/variants.md
  --help           say this

Without --venv and --python: into the active virtual environment, else into .venv in this tree.
What follows -- goes to pip, for instance an index that has the torch to use. A torch that is
installed already is kept.
END
}

fail() {
  echo "install: $*" >&2
  exit 1
}

wrong() {
  echo "install: $*; see --help" >&2
  exit 2
}

# install_packages WHY NAME...: with apt-get, or says what to install.
install_packages() {
  local why=$1 root=
  shift
  command -v apt-get >/dev/null 2>&1 || fail "$why, and there is no apt-get; please install: $*"
  [ "$(id -u)" -eq 0 ] || root=sudo
  echo "install: $why; installing $*" >&2
  $root apt-get update -qq
  $root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

supported() {
  "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

# The interpreter that ./bazelw would take; empty if there is none.
find_python() {
  local name candidates=(python3.11 python3.12 python3.13 python3)
  if [ -n "${DEEPEP_PYTHON:-}" ]; then candidates=("$DEEPEP_PYTHON"); fi
  for name in "${candidates[@]}"; do
    if supported "$name"; then
      echo "$name"
      return
    fi
  done
}

make_venv() {
  local base
  base=$(find_python)
  if [ -z "$base" ] && [ -z "${DEEPEP_PYTHON:-}" ]; then
    install_packages "there is no Python 3.11 to 3.13" python3 python3-venv
    base=$(find_python)
  fi
  [ -n "$base" ] || fail "${DEEPEP_PYTHON:-python3} is no Python 3.11 to 3.13;" \
    "set DEEPEP_PYTHON=PATH to one that is, or name one with --python"
  if ! "$base" -c 'import ensurepip, venv' 2>/dev/null; then
    local package=python3-venv
    [[ $base == */* ]] || package=$base-venv
    install_packages "$base cannot make virtual environments" "$package"
  fi
  "$base" -m venv "$1" || fail "$base could not make a virtual environment in $1; see above"
}

here=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
venv='' target='' kernels=default
while [ $# -gt 0 ]; do
  case $1 in
    --help | -h) usage && exit ;;
    --) shift && break ;;
    --venv | --python | --kernels)
      if [ $# -lt 2 ] || [ -z "$2" ]; then wrong "$1 needs a value"; fi
      case $1 in
        --venv) venv=$2 ;;
        --python) target=$2 ;;
        *) kernels=$2 ;;
      esac
      shift 2
      ;;
    *) wrong "$1 is no option" ;;
  esac
done
[[ " default gpu catalog own " == *" $kernels "* ]] ||
  wrong "--kernels is $kernels, but must be default, gpu, catalog or own"
if [ -n "$venv" ] && [ -n "$target" ]; then wrong "--venv and --python exclude each other"; fi

# Relative paths are the caller's; a name without a slash is looked for on the PATH.
[[ $target != */* || $target == /* ]] || target=$here/$target
if [ -z "$target" ]; then
  venv=${venv:-${VIRTUAL_ENV:-$root/.venv}}
  [[ $venv == /* ]] || venv=$here/$venv
  [ -x "$venv/bin/python" ] || make_venv "$venv"
  target=$venv/bin/python
fi
supported "$target" || fail "$target is no Python 3.11 to 3.13 that runs; choose another one"
"$target" -m pip --version >/dev/null 2>&1 ||
  fail "$target has no pip; run '$target -m ensurepip', or install into a new environment by --venv"

# Bazel takes the interpreter under a virtual environment: what is installed in there is not its own.
DEEPEP_PYTHON=$("$target" -c 'import sys; print(sys._base_executable)')
export DEEPEP_PYTHON
rm -f bazel-bin/python/deepep-*.whl # of other versions; Bazel makes its own again
./bazelw build "--kernels=$kernels" //python:wheel || fail "the wheel could not be built; see above"
wheels=(bazel-bin/python/deepep-*.whl)
[ -f "${wheels[0]}" ] || fail "the build made no wheel in bazel-bin/python"

# pip takes a wheel of the installed version for the installed one, unless it is told.
"$target" -m pip install --quiet --force-reinstall --no-deps "${wheels[0]}" &&
  "$target" -m pip install --quiet "$@" "${wheels[0]}" ||
  fail "pip could not install ${wheels[0]} into $target; see above"

cd / # so that nothing of this tree is imported
found=$("$target" -c 'import deepep; print(deepep.__version__, "with", len(deepep.variants()), "kernel libraries")') ||
  fail "deepep was installed into $target, but cannot be imported; see above"
echo "install: deepep $found is in $target"
echo "install: $target -m deepep.doctor looks at this machine, -m deepep.quickstart tries it"
