"""The one thing pyproject.toml cannot say: `conf/` is installed inside the package, beside the packages that are found."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["paro_lm", "paro_lm.*"]), "paro_lm.conf"],
    package_dir={"paro_lm.conf": "conf"},
    package_data={"paro_lm": ["py.typed"], "paro_lm.conf": ["*.yaml", "*/*.yaml", "*/*/*.yaml"]},
)
