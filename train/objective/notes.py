"""What a user may not expect of how the options of the objective go together."""

from dataclasses import fields

from .options import RESOLUTION_SAMPLINGS, ObjectiveOptions
from .timestep_sampling import Strata

_LOGIT = ("logit_normal", *RESOLUTION_SAMPLINGS)
_HUBER = ("huber", "pseudo_huber")
# option: the option that decides whether it is read, and the choices with which it is.
_READ_WITH = {
    "logit_mean": ("timestep_sampling", _LOGIT),
    "logit_std": ("timestep_sampling", _LOGIT),
    "sigmoid_scale": ("timestep_sampling", ("sigmoid",)),
    "mode_scale": ("timestep_sampling", ("mode",)),
    "logsnr_mean": ("timestep_sampling", ("logsnr",)),
    "logsnr_std": ("timestep_sampling", ("logsnr",)),
    "beta_alpha": ("timestep_sampling", ("beta",)),
    "beta_beta": ("timestep_sampling", ("beta",)),
    "sigma_curve": ("timestep_sampling", ("custom",)),
    "min_snr_gamma": ("weighting", ("min_snr",)),
    "huber_c": ("loss", _HUBER),
    "huber_schedule": ("loss", _HUBER),
}
_DEFAULTS = {field.name: field.default for field in fields(ObjectiveOptions)}


def objective_notes(options: ObjectiveOptions, strata: Strata) -> tuple[str, ...]:
    """What was set and has no effect in this combination, a sentence each. strata: the draws of a step and an epoch."""
    notes = []
    for name, (reader, choices) in _READ_WITH.items():
        chosen = getattr(options, reader)
        if getattr(options, name) != _DEFAULTS[name] and chosen not in choices:
            notes.append(f"{name} is not used: it belongs to {reader} {' or '.join(choices)}, which is {chosen}.")
    if options.shift > 0 and options.timestep_sampling in RESOLUTION_SAMPLINGS:
        notes.append(
            f"shift {options.shift:g} takes the place of the shift of {options.timestep_sampling}, which now draws as "
            "logit_normal does; set shift to 0 for the resolution's."
        )
    if options.sigma_range == "squeeze" and (options.min_sigma, options.max_sigma) == (0.0, 1.0):
        notes.append("sigma_range squeeze is not used: min_sigma 0 and max_sigma 1 leave the whole range.")
    if options.ip_noise_gamma_random_strength and not options.ip_noise_gamma:
        notes.append("ip_noise_gamma_random_strength is not used: ip_noise_gamma is 0.")
    if options.expert_boundary:
        notes.append("expert_boundary is not used: it belongs to two experts, and model_low_noise is not connected.")
    if options.stratified != "off" and {"batch": strata.step, "epoch": strata.epoch}[options.stratified] == 1:
        group = {"batch": "an optimizer step", "epoch": "an epoch"}[options.stratified]
        notes.append(f"stratified {options.stratified} is not used: {group} has one sample.")
    return tuple(notes)
