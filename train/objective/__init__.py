"""Training objective of rectified flow: timestep sampling, noised input, velocity target and loss.

Sigma is the noise level, 0 for the clean latent x0 and 1 for noise. On the straight path between the two,
x_t = (1 − sigma)·x0 + sigma·noise, the velocity is noise − x0 (Liu et al. 2022, arXiv 2209.03003; Esser et al. 2024,
arXiv 2403.03206, sec. 2).
"""
