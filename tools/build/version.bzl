"""The package's version, read from the Python file that states it, as the repository @package_version."""

def _package_version_impl(rctx):
    text = rctx.read(rctx.attr.source)
    _, found, rest = text.partition("__version__ = \"")
    if not found:
        fail("%s must hold a line __version__ = \"...\"; the wheel takes its version from there" % rctx.attr.source)
    rctx.file("WORKSPACE", "")
    rctx.file("BUILD", "")
    rctx.file("version.bzl", "VERSION = \"%s\"\n" % rest.partition("\"")[0])

package_version = repository_rule(
    implementation = _package_version_impl,
    attrs = {"source": attr.label(allow_single_file = True, mandatory = True)},
)
