"""An error of input is one line that asks for the name which was probably meant."""

import pytest

from fp4dse.dse import ConfigError, Quantizer, Space, load_recipe
from fp4dse.dse.cost import load_chip, load_model


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        (lambda: load_recipe("nvpf4"), "nvfp4"),
        (lambda: load_recipe("NVFP4-SR"), "nvfp4-sr"),
        (lambda: load_chip("h20"), "h200"),
        (lambda: load_model("lama-8b"), "llama-8b"),
        (lambda: Quantizer.named("mxpf4"), "mxfp4"),
        (lambda: Space.from_dict({"axis": {}}), "axes"),
        (lambda: Space.from_dict({"axes": {"*.g.roundin": ["nearest"]}}), "*.g.rounding"),
        (lambda: Space.from_dict({"axes": {"wgard.rotation": ["none"]}}), "wgrad.rotation"),
        (lambda: Space.from_dict({"axes": {"*.g.rounding": ["stochstic"]}}), "stochastic"),
        (lambda: Space.from_dict({"design": "factoral"}), "factorial"),
        (lambda: Space.from_dict({"base": "quartett"}), "quartet"),
    ],
)
def test_the_name_that_was_probably_meant_is_asked_for(wrong, meant):
    with pytest.raises(ConfigError) as caught:
        wrong()
    assert str(caught.value).endswith(f"; did you mean {meant!r}?")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("found", "accepted"),
    [
        ("sr", "nearest, half-away, stochastic, or a table"),
        ("fil", "abc, or a .toml file"),
        ("x", "a, b, c"),
        (3, "3.5, 30"),
        (None, "none, nothing"),
        ("", "a, b"),
        ("runs", "the folder of a store (there is none under runs/; try `fp4dse quickstart`)"),
    ],
)
def test_nothing_is_asked_where_nothing_is_alike(found, accepted):
    assert str(ConfigError("where", found, accepted)).endswith(
        f"found {'nothing' if found is None else repr(found)}; accepted: {accepted}"
    )
