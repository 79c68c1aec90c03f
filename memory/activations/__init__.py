"""TITLE memory/activations"""
