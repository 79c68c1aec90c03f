"""The objective of rectified flow: which noise levels are drawn, what the model is shown, and what it is to say.

Sigma is the noise level: 0 is the picture, 1 is noise, and on the straight path between them x_t = (1 − sigma)·x0 +
sigma·noise the velocity is noise − x0 (Liu et al. 2022, arXiv 2209.03003; Esser et al. 2024, arXiv 2403.03206, sec. 2).
"""
