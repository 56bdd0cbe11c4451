"""The space `quartet2` and the published table are about the same recipes."""

from pathlib import Path

import fp4dse
from fp4dse.dse import Space
from fp4dse.results.published import tables

FILE = Path(fp4dse.__file__).parent / "sweeps" / "spaces" / "quartet2.toml"


def test_every_scheme_is_a_joined_space_of_its_name_or_not_expressible():
    recipes = {space.name: [recipe.config_id for recipe in space.recipes()] for space in Space.load(FILE).join}
    schemes = tables()["quartet2"].schemes
    assert recipes == {name: [scheme.recipe] for name, scheme in schemes.items() if scheme.recipe is not None}
    assert {name for name, scheme in schemes.items() if scheme.not_expressible} == set(schemes) - set(recipes)
    assert tables()["quartet2"].space == FILE.stem


def test_the_file_names_the_schemes_that_it_lacks():
    text = FILE.read_text()
    for name, scheme in tables()["quartet2"].schemes.items():
        if scheme.not_expressible and "old maxima" not in name:
            assert f"`{name}`" in text
