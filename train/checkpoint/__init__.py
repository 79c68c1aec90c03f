"""TITLE train/checkpoint"""
