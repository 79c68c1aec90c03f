"""TITLE train/placement"""
