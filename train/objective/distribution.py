"""Distributions of noise levels before the shift, each with its cumulative distribution function and quantiles."""

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Protocol

import torch
from scipy import special

from .options import ObjectiveOptions


class Distribution(Protocol):
    """Distribution of sigma on [0, 1]."""

    def cdf(self, sigma: float) -> float:
        """Return the probability of a sample below `sigma` (cumulative distribution function)."""
        ...

    def quantile(self, probability: float) -> float:
        """Return the sigma that a sample is below with probability `probability` (inverse of `cdf`)."""
        ...


@dataclass(frozen=True)
class Uniform:
    """Uniform distribution on [0, 1]."""

    def cdf(self, sigma: float) -> float:
        return min(max(sigma, 0.0), 1.0)

    def quantile(self, probability: float) -> float:
        return probability


@dataclass(frozen=True)
class LogitNormal:
    """Logit-normal distribution: sigmoid(mean + std·n), n normal (Esser et al. 2024, arXiv 2403.03206, sec. 3.1).

    mean: mean of the logit.
    std: standard deviation of the logit.
    """

    mean: float
    std: float

    def cdf(self, sigma: float) -> float:
        if not 0.0 < sigma < 1.0:
            return float(sigma > 0.5)
        return NormalDist(self.mean, self.std).cdf(math.log(sigma / (1.0 - sigma)))

    def quantile(self, probability: float) -> float:
        if probability in (0.0, 1.0):
            return probability
        logit = NormalDist(self.mean, self.std).inv_cdf(probability)
        return 1.0 / (1.0 + math.exp(-logit)) if logit > -700 else 0.0


@dataclass(frozen=True)
class Mode:
    """Mode sampling with heavy tails: f(u) = 1 − u − s·(cos²(πu/2) − 1 + u), u uniform (arXiv 2403.03206, sec. 3.1).

    scale: s. f falls from 1 to 0 for −1 ≤ s ≤ 2/(π − 2). s > 0 favours the middle, s < 0 the ends.
    """

    scale: float

    def quantile(self, probability: float) -> float:
        u = 1.0 - probability
        return min(max(1.0 - u - self.scale * (math.cos(math.pi * u / 2) ** 2 - 1.0 + u), 0.0), 1.0)

    def cdf(self, sigma: float) -> float:
        if not 0.0 < sigma < 1.0:
            return float(sigma > 0.5)
        low, high = 0.0, 1.0
        for _ in range(60):  # bisection: f has no closed inverse; 2^−60 is below float64's resolution
            middle = 0.5 * (low + high)
            low, high = (middle, high) if self.quantile(middle) < sigma else (low, middle)
        return 0.5 * (low + high)


@dataclass(frozen=True)
class Beta:
    """Beta distribution: density sigma^(alpha − 1)·(1 − sigma)^(beta − 1) / B(alpha, beta) on [0, 1].

    alpha: exponent of sigma plus 1, above 0.
    beta: exponent of 1 − sigma plus 1, above 0.
    """

    alpha: float
    beta: float

    def cdf(self, sigma: float) -> float:
        return float(special.betainc(self.alpha, self.beta, min(max(sigma, 0.0), 1.0)))

    def quantile(self, probability: float) -> float:
        return float(special.betaincinv(self.alpha, self.beta, probability))


@lru_cache(maxsize=8)
def distribution_of(options: ObjectiveOptions) -> Distribution:
    """Return the distribution of `timestep_sampling`.

    logit_normal and the resolution_… ones: LogitNormal(logit_mean, logit_std).
    sigmoid: LogitNormal(0, sigmoid_scale) (kohya-ss/sd-scripts, `--timestep_sampling sigmoid --sigmoid_scale`).
    logsnr: log SNR = 2·log((1 − sigma)/sigma) is normal, so that logit(sigma) = −logSNR/2 is too (Choi et al. 2024,
    arXiv 2411.14793, with mean −6 and std 2 for learning styles).
    uniform, mode, beta, custom: see their classes.
    """
    match options.timestep_sampling:
        case "uniform":
            return Uniform()
        case "sigmoid":
            return LogitNormal(0.0, options.sigmoid_scale)
        case "logsnr":
            return LogitNormal(-options.logsnr_mean / 2, options.logsnr_std / 2)
        case "mode":
            return Mode(options.mode_scale)
        case "beta":
            return Beta(options.beta_alpha, options.beta_beta)
        case "custom":
            return options.curve
    return LogitNormal(options.logit_mean, options.logit_std)


def sample_from(distribution: Distribution, generator: torch.Generator) -> float:
    """Sample one sigma in float64: logit-normal from a normal number, others by inverse transform sampling."""
    if isinstance(distribution, LogitNormal):
        n = torch.randn((), generator=generator, dtype=torch.float64)
        return torch.sigmoid(distribution.mean + distribution.std * n).item()
    return distribution.quantile(torch.rand((), generator=generator, dtype=torch.float64).item())
