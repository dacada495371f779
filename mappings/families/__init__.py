"""One file per family; importing this package registers them all."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    if _module.name != "shared":
        importlib.import_module(f"{__name__}.{_module.name}")
