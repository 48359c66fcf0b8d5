"""python -m deepep.variants [--explain NAME] lists the kernel libraries; --help says the rest.

In code deepep.variants is a function, and stays it when somebody imports this module.
"""

import sys

from deepep import listing, registry

if __name__ == "__main__":
    sys.exit(listing.main())
sys.modules[__name__] = registry.variants  # type: ignore[assignment]
