"""TITLE train/optim"""
