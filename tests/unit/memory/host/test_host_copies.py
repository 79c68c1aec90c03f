"""A model that went to the device and back has its weights on the host where they lay."""

import torch
from comfy.model_patcher import ModelPatcher
from tessera.memory.swap.host_copies import host_copies_retained
from torch import nn


def moved_there_and_back(model):
    """Give the weights new memory on the host, as `model.to(device)` and back do."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def test_the_weights_lie_where_they_lay():
    with torch.inference_mode():  # as core's loaders make them
        loaded = nn.Linear(4, 4)
    model = nn.Sequential(loaded, nn.Linear(4, 2))
    lay = [p.data_ptr() for p in model.parameters()]
    cpu = torch.device("cpu")
    with host_copies_retained(ModelPatcher(model, cpu, cpu)):
        moved_there_and_back(model)
        assert not set(lay) & {p.data_ptr() for p in model.parameters()}
    assert [p.data_ptr() for p in model.parameters()] == lay
    assert model(torch.ones(1, 4)).shape == (1, 2)


def test_module_with_another_weight_stays_as_it_is():
    model = nn.Linear(4, 4)
    cpu = torch.device("cpu")
    with host_copies_retained(ModelPatcher(model, cpu, cpu)):
        model.weight = nn.Parameter(torch.zeros(2, 4))
        model.bias.data = model.bias.data.to(torch.bfloat16)
    assert model.weight.shape == (2, 4) and model.bias.dtype == torch.bfloat16
