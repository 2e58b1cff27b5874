"""Packages and package data of kgen; everything else is in pyproject.toml.

kgen is one import package made of the top-level folders: ``dsl/`` is ``kgen.dsl``, ``codegen/`` is
``kgen.codegen`` and so on. The repository thus reads by phase, and no package named ``dsl`` or ``ops`` lands
in a user's site-packages. Under such a mapping pyproject.toml can only list packages by hand; here they are
found, so a new folder with an ``__init__.py`` is picked up by itself.
"""

from setuptools import find_packages, setup

FOLDERS = {
    "kgen": "kgen",
    "kgen.dsl": "dsl",
    "kgen.codegen": "codegen",
    "kgen.templates": "templates",
    "kgen.runtime": "runtime",
    "kgen.ops": "ops",
}

packages = [
    name
    for package, folder in FOLDERS.items()
    for name in (package, *(f"{package}.{sub}" for sub in find_packages(folder)))
]

setup(
    packages=packages,
    package_dir=FOLDERS,
    # The default, True, leaves package_data out of the source distribution.
    include_package_data=False,
    # For every package; "**" also reaches folders that hold only data, such as templates/cuda/.
    package_data={"": ["py.typed", "**/*.lark", "**/*.kdsl", "**/*.j2", "**/*.hpp", "**/*.cpp", "**/*.json"]},
)
