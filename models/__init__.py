"""What this project knows about particular target models: declarative recipes, standard library only.

Weights never live here, except small exit heads shipped as package data. Fetching and quantizing what a recipe
describes is the business of `eesd_lite.prepare`.
"""

from models.recipe import Calibration, FrequentIds, HeadFile, Quantization, Recipe, RecipeError, WheelOrigin, data_file
from models.registry import RECIPES, find_recipe

__all__ = [
    "RECIPES",
    "Calibration",
    "FrequentIds",
    "HeadFile",
    "Quantization",
    "Recipe",
    "RecipeError",
    "WheelOrigin",
    "data_file",
    "find_recipe",
]
