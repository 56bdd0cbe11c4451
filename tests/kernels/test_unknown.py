"""A codec, a relaxation or a gradient that a kernel lacks does not compile, whoever gets it past the checks before.

In Triton's interpreter, and on a CUDA device where there is one.
"""

import msgspec
import pytest
import torch

from fp4dse.dse import Quantizer
from fp4dse.dse.estimator import DGE, Through
from fp4dse.dse.formats import ELEMENTS
from fp4dse.kernels.quant.call import Call
from fp4dse.kernels.quant.descriptor import descriptor
from fp4dse.kernels.quant.spec.estimators import numbers
from fp4dse.kernels.quant.triton.features import features_of

NVFP4 = msgspec.structs.replace(Quantizer.named("nvfp4"), tensor_scale=None)
FORM = Through(element=DGE(), scale="exact").form()


def elements(place, x, call):
    scale = torch.ones(1, x.shape[1], device=x.device)
    place.elements.launch_elements(x, scale, scale, None, call, torch.empty_like(x))


def operand(place, x, call):
    place.launch.launch(x, False, call, (torch.empty_like(x), None, torch.empty(1, device=x.device)))


def gradient(place, x, call, form=FORM):
    of = numbers(Through(element=DGE(), scale="exact"), ELEMENTS["e2m1"], x.device)
    place.estimators.launch(x, x, call, of, form, torch.empty_like(x))


def given(place, **more):
    tables = (t.to(place.device) for t in descriptor([NVFP4]))
    call = Call(16, *tables, features_of(*descriptor([NVFP4])), torch.arange(1), torch.tensor(0), 0, **more)
    call = call._replace(seeds=call.seeds.to(place.device), step=call.step.to(place.device))
    return torch.randn(1, 16, 16).to(place.device), call


def said(error):
    """What was said by the error and by those that it came from."""
    return "" if error is None else f"{error} {said(error.__cause__ or error.__context__)}"


@pytest.mark.parametrize("run", [elements, operand, gradient])
def test_a_codec_that_a_kernel_lacks_does_not_compile(place, run):
    run(place, *given(place))
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the compiler's, or the interpreter's
        run(place, *given(place, codec="later"))
    assert "a codec that this kernel" in said(caught.value)


@pytest.mark.parametrize("number", [0, 2, 3], ids=["element", "scale", "scale rounding"])
def test_a_form_that_the_kernel_of_estimators_lacks_does_not_compile(place, number):
    form = list(FORM)
    form[number] = "later"
    with pytest.raises(Exception) as caught:  # noqa: PT011
        gradient(place, *given(place), tuple(form))
    assert "that this kernel" in said(caught.value)
