#!/bin/bash
# Run nvcc so that one source always gives one object, wherever the build runs.
#
# usage: nvcc_stable.sh NAME NVCC [nvcc argument]... -o OUT     (-o OUT comes last)
#
# Two things would differ between two builds of the same source:
# - nvcc hashes the absolute path of the source into the names of a relocatable object's symbols,
#   and a sandbox has a new path each time.  `nvcc --dryrun` prints the commands that nvcc would
#   run; this runs them with NAME in place of that path.
# - nvcc names its temporary files after its process id, and one such name stays in the object.
#   --keep-dir names them after the source instead.  It also keeps parallel actions apart: every
#   sandbox counts its own process ids but all share /tmp, where two nvcc with id 3 would collide.
#
# It is a shell script, so that no kernel is compiled anew when only the Python changes.
set -eu -o pipefail

name=$1
nvcc=$2
shift 2
work=${!#}.tmp
rm -rf "$work"
mkdir -p "$work"

if ! plan=$("$nvcc" --dryrun --keep --keep-dir="$work" "$@" 2>&1); then
  printf '%s\n' "$plan" >&2
  exit 1
fi
while IFS= read -r line; do
  if [[ $line =~ ^'#$ '([A-Za-z_]+)=(.*)$ ]]; then
    export "${BASH_REMATCH[1]}=${BASH_REMATCH[2]}"
  elif [[ $line == '#$ rm '* ]]; then
    : # the whole folder goes at the end
  elif [[ $line =~ ^'#$ '(.*)'--orig_src_path_name "'[^\"]*\"(.*)$ ]]; then
    sh -c "${BASH_REMATCH[1]}--orig_src_path_name \"$name\"${BASH_REMATCH[2]}"
  elif [[ $line == '#$ '* ]]; then
    sh -c "${line#'#$ '}"
  else
    printf '%s\n' "$line" >&2
  fi
done <<<"$plan"
rm -rf "$work"
