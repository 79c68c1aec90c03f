"""TITLE memory/weights"""
