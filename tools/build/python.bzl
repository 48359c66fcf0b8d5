"""The Python interpreter and the locked wheels, as repositories.

python_interpreter() finds one interpreter and makes it Bazel's Python toolchain.
python_wheels() declares one repository per locked wheel, so a wheel is fetched only by a build
that needs it: kernel libraries need Jinja2 and never fetch torch.

Must hold: no absolute path reaches an action (caches are shared between machines), nothing that is
installed in the interpreter is visible to a build, every file's hash is in the lock.
"""

_ENV = "DEEPEP_PYTHON"
_SUPPORTED = ["3.11", "3.12", "3.13"]
_PROBE = """
import json, sys, sysconfig
json.dump({
    "exe": sys.executable,
    "version": "%d.%d" % sys.version_info[:2],
    "full": sys.version.split()[0],
    "include": sysconfig.get_paths()["include"],
}, sys.stdout)
"""

def _candidates(rctx):
    chosen = rctx.os.environ.get(_ENV, "")
    if chosen:
        return [chosen]
    return ["python" + v for v in _SUPPORTED] + ["python3"]

def find_python(rctx):
    """Finds the interpreter to use, by $DEEPEP_PYTHON or on the PATH.

    Args:
      rctx: a repository rule's context.

    Returns:
      {"exe", "version", "full", "include"} of the first supported interpreter.
    """
    tried = []
    for name in _candidates(rctx):
        path = name if "/" in name else rctx.which(name)
        if not path:
            tried.append(name + ": not on the PATH")
            continue
        probe = rctx.execute([path, "-c", _PROBE])
        if probe.return_code:
            tried.append("%s: %s" % (path, probe.stderr.strip()))
            continue
        facts = json.decode(probe.stdout)
        if facts["version"] in _SUPPORTED:
            return facts
        tried.append("%s: Python %s" % (path, facts["full"]))
    return fail("No supported Python (%s) found; set %s=/path/to/python3. Tried: %s" %
                (", ".join(_SUPPORTED), _ENV, "; ".join(tried)))

def foreign_machine(rctx):
    """What this machine is, where the lock has no wheels of compiled code for it.

    Args:
      rctx: a repository rule's context.

    Returns:
      "", or the machine's name, such as "aarch64".
    """
    machine = rctx.execute(["uname", "-m"]).stdout.strip()
    return "" if machine == "x86_64" else machine

def pip_install(rctx, pinned, target, options = []):
    """Installs pinned wheels into a folder of the repository.

    pip reads the machine's own configuration (index, find-links), so none of it is in the project.

    Args:
      rctx: a repository rule's context.
      pinned: lines of a requirements file, each with its hashes.
      target: the folder.
      options: further arguments of `pip install`.

    Returns:
      "", or what pip said when it failed.
    """
    rctx.file("requirements.txt", "".join([line + "\n" for line in pinned]))
    done = rctx.execute([
        find_python(rctx)["exe"],
        "-m",
        "pip",
        "install",
        "--require-hashes",
        "--no-deps",
        "--only-binary=:all:",
        "--no-compile",
        "--disable-pip-version-check",
        "--no-input",
        "--quiet",
        "--target",
        target,
        "-r",
        "requirements.txt",
    ] + options, timeout = 3600)
    if done.return_code == 0:
        return ""
    rctx.delete(target)
    return done.stderr

def pinned(dist, version, hashes):
    """One line of a requirements file.

    Args:
      dist: the distribution's name.
      version: its version.
      hashes: SHA-256 of each file that may be taken.

    Returns:
      The line.
    """
    return "%s==%s" % (dist, version) + "".join([" --hash=sha256:" + h for h in hashes])

# ---- the interpreter

_INTERPRETER_BUILD = """\
load("@bazel_tools//tools/python:toolchain.bzl", "py_runtime_pair")

package(default_visibility = ["//visibility:public"])

# A virtual environment with nothing in it: what is installed in the interpreter stays out of every
# build, and the launchers name the interpreter by its place in the runfiles, the same everywhere.
py_runtime(
    name = "runtime",
    files = ["venv/pyvenv.cfg"],
    interpreter = "venv/bin/python3",
    python_version = "PY3",
    stub_shebang = "#!/usr/bin/env python3",
)

py_runtime_pair(name = "pair", py3_runtime = ":runtime")

toolchain(
    name = "toolchain",
    toolchain = ":pair",
    toolchain_type = "@bazel_tools//tools/python:toolchain_type",
)

cc_library(
    name = "headers",
    hdrs = glob(["include/**/*.h"]),
    includes = ["include"],
)
"""

def _python_interpreter_impl(rctx):
    facts = find_python(rctx)
    rctx.symlink(facts["exe"], "venv/bin/python3")
    rctx.file(
        "venv/pyvenv.cfg",
        "home = %s\ninclude-system-site-packages = false\n" % facts["exe"].rpartition("/")[0],
    )
    rctx.symlink(facts["include"], "include")
    rctx.file("WORKSPACE", "")
    rctx.file("BUILD", _INTERPRETER_BUILD)
    rctx.file("version.bzl", "PYTHON_VERSION = \"%s\"\n" % facts["version"])

python_interpreter = repository_rule(
    implementation = _python_interpreter_impl,
    configure = True,
    environ = [_ENV, "PATH"],
)

# ---- the wheels

_WHEEL_BUILD = """\
package(default_visibility = ["//visibility:public"])

py_library(
    name = "{repo}",
    srcs = glob(["site/**/*.py"], exclude = {exclude}),
    data = glob(["site/**/*"], exclude = ["**/*.py", "**/* *"] + {exclude}),
    imports = ["site"],
    srcs_version = "PY3",
    deps = {deps},
)

cc_library(
    name = "headers",
    hdrs = glob({headers}, allow_empty = True),
    includes = {includes},
)
"""

def _compile_modules(rctx):
    """Writes bytecode beside the modules, which halves the time that each test imports torch for.

    Tests may not write it themselves: what they see is read-only. It holds no time and no absolute
    path, and is never compared with the source, so copies and links of it stay valid. Modules that
    do not compile (test data of some wheels) are left to whoever imports them.
    """
    rctx.execute([
        find_python(rctx)["exe"],
        "-m",
        "compileall",
        "-q",
        "-j",
        "0",
        "--invalidation-mode",
        "unchecked-hash",
        "-s",
        str(rctx.path("site")),
        str(rctx.path("site")),
    ], environment = {"PYTHONHASHSEED": "0"}, timeout = 1800)

def _python_wheel_impl(rctx):
    attr = rctx.attr
    rctx.report_progress("pip install %s==%s" % (attr.dist, attr.version))
    error = "no hash of it in the lock"
    if attr.local_hashes:
        error = pip_install(rctx, [pinned(attr.dist, attr.version, attr.local_hashes)], "site", ["--no-index"])
    if error:
        error = pip_install(rctx, [pinned(attr.dist, attr.version, attr.hashes)] + attr.bundle, "site")
    if error:
        machine = foreign_machine(rctx)
        if machine:
            error += ("The machine is %s, and third_party/python/lock.bzl has compiled wheels for " +
                      "x86_64 only. Run tools/lock_wheels.py here to lock those of this machine.") % machine
        fail("pip could not install %s==%s:\n%s" % (attr.dist, attr.version, error))
    if not attr.programs:
        rctx.delete("site/bin")
    _compile_modules(rctx)
    rctx.file("WORKSPACE", "")
    rctx.file("BUILD", _WHEEL_BUILD.format(
        repo = rctx.name,
        deps = repr(["@pypi_%s" % name for name in attr.requires]),
        exclude = repr(attr.exclude + ["site/*.dist-info/RECORD", "site/*.dist-info/direct_url.json"]),
        headers = repr(["site/%s/**/*.h" % d for d in attr.include_dirs]),
        includes = repr(["site/" + d for d in attr.include_dirs]),
    ))

_python_wheel = repository_rule(
    implementation = _python_wheel_impl,
    attrs = {
        "bundle": attr.string_list(
            doc = "Pinned lines of what the index's build needs beside it, in the same folder.",
        ),
        "dist": attr.string(mandatory = True),
        "exclude": attr.string_list(doc = "Globs of files that no target shall see."),
        "hashes": attr.string_list(mandatory = True),
        "include_dirs": attr.string_list(doc = "Folders of C++ headers, for the target :headers."),
        "local_hashes": attr.string_list(
            doc = "Hashes of a build that is tried first, only among the files that pip's " +
                  "find-links name on this machine. (Given both hashes at once, pip prefers the " +
                  "index's file: it knows that one's hash before a download.)",
        ),
        "programs": attr.bool(doc = "Whether the module runs a program in site/bin."),
        "requires": attr.string_list(),
        "version": attr.string(mandatory = True),
    },
    environ = [_ENV],
)

def python_wheels(lock, layout = {}):
    """Declares one repository @pypi_NAME per locked wheel, NAME in lower case with '_' for '-'.

    Args:
      lock: {NAME: {"dist", "version", "hashes", ...}}, made by tools/lock_wheels.py.
      layout: {NAME: further attributes of that wheel's repository}.
    """
    for name, wheel in lock.items():
        _python_wheel(name = "pypi_" + name, **dict(wheel, **layout.get(name, {})))
