#!/bin/bash
# Run nvcc so that one source always gives one object, wherever the build runs.
#
# usage: nvcc_stable.sh NAME REPORT NVCC [nvcc argument]... -o OUT     (-o OUT comes last)
#
# Two things would differ between two builds of the same source:
# - nvcc hashes the absolute path of the source into the names of a relocatable object's symbols,
#   and a sandbox has a new path each time.  `nvcc --dryrun` prints the commands that nvcc would
#   run; this runs them with NAME in place of that path.
# - nvcc names its temporary files after its process id, and one such name stays in the object.
#   --keep-dir names them after the source instead.  It also keeps parallel actions apart: every
#   sandbox counts its own process ids but all share /tmp, where two nvcc with id 3 would collide.
#   (The dry run writes there too, to ask the host compiler: hence TMPDIR.)
#
# REPORT gets what ptxas says of each kernel (-Xptxas -v); empty where no kernel is compiled.
#
# It is a shell script, so that no kernel is compiled anew when only the Python changes.
set -eu -o pipefail

name=$1
report=$2
nvcc=$3
shift 3
work=${!#}.tmp
said=$work.said
rm -rf "$work" "$said"
mkdir -p "$work"

# Runs one command; what ptxas says of kernels is kept, everything else is shown.
run() {
  local code=0
  sh -c "$1" 2>"$said" || code=$?
  grep -E "$kernels" "$said" >>"$report" || true
  grep -vE "^ptxas info|$kernels" "$said" >&2 || true
  return $code
}
kernels='Compiling entry function|bytes stack frame|: Used [0-9]+ registers'
: >"$report"

if ! plan=$(TMPDIR=$work "$nvcc" --dryrun --keep --keep-dir="$work" "$@" 2>&1); then
  printf '%s\n' "$plan" >&2
  exit 1
fi
while IFS= read -r line; do
  if [[ $line =~ ^'#$ '([A-Za-z_]+)=(.*)$ ]]; then
    export "${BASH_REMATCH[1]}=${BASH_REMATCH[2]}"
  elif [[ $line == '#$ rm '* ]]; then
    : # the whole folder goes at the end
  elif [[ $line =~ ^'#$ '(.*)'--orig_src_path_name "'[^\"]*\"(.*)$ ]]; then
    run "${BASH_REMATCH[1]}--orig_src_path_name \"$name\"${BASH_REMATCH[2]}"
  elif [[ $line == '#$ '* ]]; then
    run "${line#'#$ '}"
  else
    printf '%s\n' "$line" >&2
  fi
done <<<"$plan"
rm -rf "$work" "$said"
