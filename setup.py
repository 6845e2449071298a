"""The packages of a wheel; all else stands in pyproject.toml, which cannot add any to those that it finds."""

from setuptools import find_namespace_packages, find_packages, setup

recipes = ["xcompat.recipes", *(f"xcompat.recipes.{folder}" for folder in find_namespace_packages("recipes"))]
setup(packages=[*find_packages(include=["xcompat*"]), *recipes])
