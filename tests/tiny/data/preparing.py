"""Prepare Dataset's work with options by name, as the tests write them."""

from dataclasses import fields


def prepare(dataset, vae, clip, cache_dir, **options):
    """The prepared data. options: those of PrepareOptions and of `prepare` itself."""
    from tessera.data.preparation import prepare as module

    names = {field.name for field in fields(module.PrepareOptions)}
    beside = {name: options.pop(name) for name in list(options) if name not in names}
    return module.prepare(dataset, vae, clip, module.PrepareOptions(**options), cache_dir, **beside)
