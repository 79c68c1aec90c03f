"""TITLE train/preview"""
