"""The identity of the machine's C++ compiler, as the repository @host_compiler.

Bazel does not count the system's compiler among an action's inputs. Rules put HOST_COMPILER into
their actions' environment, so that machines with different compilers never share a cache entry.
"""

def _host_compiler_impl(rctx):
    compiler = rctx.os.environ.get("CC", "") or "gcc"
    found = rctx.execute([compiler, "--version"])
    if found.return_code:
        fail("C++ compiler %s does not run: %s. Install g++, or name a compiler by CC=/path" % (compiler, found.stderr.strip()))
    libc = rctx.execute(["getconf", "GNU_LIBC_VERSION"])
    rctx.file("WORKSPACE", "")
    rctx.file("BUILD", "")
    rctx.file("version.bzl", "HOST_COMPILER = \"%s, %s\"\n" % (
        found.stdout.split("\n")[0],  # gcc (Debian 12.2.0-14) 12.2.0
        libc.stdout.strip(),  # glibc 2.36
    ))

host_compiler = repository_rule(
    implementation = _host_compiler_impl,
    configure = True,
    environ = ["CC", "PATH"],
)
