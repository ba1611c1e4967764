"""Import every module of the packages named by the arguments, and print `imported`."""

import importlib
import pkgutil
import sys

for package in sys.argv[1:]:
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
print("imported")
