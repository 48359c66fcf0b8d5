"""Stand-ins for @rules_cc, @rules_java and @rules_proto that need no download.

Bazel 4 and 5 carry these rules inside, yet their own packages load the names from those three
repositories, which the default workspace would fetch from github.com.  A repository made here
holds the names alone, each bound to the rule that is inside Bazel.  Debian's bazel-rules-cc
(0.0.4) is no help: it loads symbols that Debian's Bazel 4.2.3 lacks.
"""

_NAMES = {
    "rules_cc": ("cc", [
        "cc_binary",
        "cc_import",
        "cc_library",
        "cc_proto_library",
        "cc_test",
        "cc_toolchain",
        "cc_toolchain_suite",
        "objc_library",
    ]),
    "rules_java": ("java", [
        "java_binary",
        "java_import",
        "java_library",
        "java_proto_library",
        "java_runtime",
        "java_test",
        "java_toolchain",
    ]),
    "rules_proto": ("proto", [
        "proto_lang_toolchain",
        "proto_library",
    ]),
}

def _builtin_rules_impl(rctx):
    rctx.file("WORKSPACE", "workspace(name = \"%s\")\n" % rctx.name)
    rctx.file(rctx.attr.package + "/BUILD", "exports_files([\"defs.bzl\"])\n")
    rctx.file(
        rctx.attr.package + "/defs.bzl",
        "".join(["%s = native.%s\n" % (rule, rule) for rule in rctx.attr.rules]),
    )

_builtin_rules = repository_rule(
    implementation = _builtin_rules_impl,
    attrs = {
        "package": attr.string(mandatory = True),
        "rules": attr.string_list(mandatory = True),
    },
)

_COVERAGE_BUILD = """\
# `bazel coverage` needs the real tools; building and testing need only that these labels exist.
package(default_visibility = ["//visibility:public"])

filegroup(name = "coverage_report_generator")

filegroup(name = "lcov_merger")
"""

def _no_coverage_tools_impl(rctx):
    rctx.file("WORKSPACE", "workspace(name = \"%s\")\n" % rctx.name)
    rctx.file("BUILD", _COVERAGE_BUILD)

_no_coverage_tools = repository_rule(implementation = _no_coverage_tools_impl)

def builtin_rules():
    """Declares the stand-ins, except on a Bazel that needs the real repositories (6 and newer)."""
    major = native.bazel_version.split(".")[0] if native.bazel_version else ""
    if major.isdigit() and int(major) >= 6:
        return
    for name, (package, rules) in _NAMES.items():
        if not native.existing_rule(name):
            _builtin_rules(name = name, package = package, rules = rules)
    if not native.existing_rule("remote_coverage_tools"):
        _no_coverage_tools(name = "remote_coverage_tools")
